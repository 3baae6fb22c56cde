"""Process groups of a mesh, counted on torch's backend that sends nothing: one for each set of ranks."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from thresher.distributed import groups as groups_module
from thresher.distributed.mesh import Mesh, ParallelDims

CPU = torch.device("cpu")


@pytest.fixture
def world_of():
    def init(rank: int, size: int) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)

    yield init
    dist.destroy_process_group()


def groups() -> list[tuple[int, ...]]:
    """The ranks of each group of this process."""
    return sorted((tuple(ranks) for ranks in dist.distributed_c10d._world.pg_group_ranks.values()), key=len)


@pytest.mark.parametrize(
    ("rank", "dims", "sizes"),
    [
        (5, ParallelDims(dp_shard=64), [64]),
        (1000, ParallelDims(tp=8, dp_shard=128), [8, 128, 1024]),
        (77, ParallelDims(tp=8, dp_replicate=2, dp_shard=8), [2, 8, 8, 16, 128]),
        (301, ParallelDims(pp=4, cp=2, tp=4, dp_shard=32), [2, 4, 4, 32, 64, 128, 1024]),
        # shards of experts are those of the rest: ep is all of tp
        (3, ParallelDims(tp=2, dp_shard=8, ep=2), [2, 8, 16]),
        # nothing is left to shard: FSDP2 has a group of one process
        (1, ParallelDims(tp=2, ep=2), [1, 2]),
    ],
    ids=str,
)
def test_a_process_has_the_world_and_the_distinct_groups_of_its_mesh(world_of, rank, dims, sizes):
    world_of(rank, dims.num_processes)
    policy = Mesh.create(dims, CPU)
    assert [len(ranks) for ranks in groups()] == sizes
    assert len(set(groups())) == len(sizes)
    reference = Mesh.create(dims, CPU)
    assert [len(ranks) for ranks in groups()] == sizes
    assert reference.device_mesh == policy.device_mesh
    assert reference.groups == policy.groups


def test_a_reference_on_another_mesh_shares_the_groups_that_are_equal(world_of):
    world_of(9, 64)
    Mesh.create(ParallelDims(tp=8, dp_shard=8), CPU)
    before = groups()
    assert [len(ranks) for ranks in before] == [8, 8, 64]
    Mesh.create(ParallelDims(tp=8, dp_replicate=8), CPU)
    assert groups() == before
    Mesh.create(ParallelDims(tp=4, dp_shard=16), CPU)
    assert [len(ranks) for ranks in groups()] == [4, 8, 8, 16, 64]


def test_groups_have_the_ranks_that_differ_in_their_dimensions_only(world_of):
    dims = ParallelDims(pp=2, dp_replicate=2, dp_shard=2, cp=2, tp=2)
    world_of(13, 32)  # 0, 1, 1, 0, 1
    found = {name: dist.get_process_group_ranks(each.group) for name, each in Mesh.create(dims, CPU).groups.items()}
    assert found == {
        "pp": [13, 29],
        "dp_replicate": [5, 13],
        "shard": [9, 11, 13, 15],
        "cp": [13, 15],
        "tp": [12, 13],
        "data": [1, 5, 9, 13],
        "metrics": [1, 5, 9, 13, 17, 21, 25, 29],
    }


def test_groups_have_the_time_limit_of_peers_and_neither_the_default_nor_the_worlds(tmp_path, monkeypatch):
    limit, of_world = timedelta(minutes=7), timedelta(minutes=5)
    monkeypatch.setattr(groups_module, "PEER_TIMEOUT", limit)
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=of_world)
    try:
        own = groups_module._create_group([[0]], "shard")
        assert [each._get_backend(CPU).options._timeout for each in (dist.group.WORLD, own)] == [of_world, limit]
    finally:
        dist.destroy_process_group()


def test_a_new_world_has_new_groups(world_of):
    for _ in range(2):
        world_of(0, 16)
        assert len(groups()) == 1
        Mesh.create(ParallelDims(tp=4, dp_shard=4), CPU)
        assert [len(ranks) for ranks in groups()] == [4, 4, 16]
