"""Count process groups and gloo's sockets per rank: `python benchmarks/growth_groups.py`.

For 64 to 1,024 ranks one process stands for a rank of a world of torch's `fake` backend; for 4 to 16 real ranks
(`--real`) gloo's sockets are counted in /proc/self/fd. `--megatron` counts Megatron-Core's groups instead of the native
engine's (needs the extra `megatron`).
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from thresher.distributed.groups import Group
from thresher.distributed.mesh import Mesh, ParallelDims

CPU = torch.device("cpu")


def meshes(num_ranks: int) -> list[ParallelDims]:
    return [
        ParallelDims(dp_shard=num_ranks),
        ParallelDims(tp=8, dp_shard=num_ranks // 8),
        ParallelDims(tp=8, dp_replicate=2, dp_shard=num_ranks // 16),
        ParallelDims(pp=4, tp=8, dp_shard=num_ranks // 32),
        ParallelDims(pp=4, cp=2, tp=4, dp_shard=num_ranks // 32),
        ParallelDims(pp=2, cp=2, tp=4, ep=8, dp_shard=num_ranks // 16),
    ]


def title(dims: ParallelDims) -> str:
    return " x ".join(f"{name} {size}" for name, size in vars(dims).items() if size > 1)


def group_sizes() -> list[int]:
    """Sizes of this process's groups, the world among them."""
    members = dist.distributed_c10d._world.pg_group_ranks.items()
    return sorted(
        (len(ranks) for group, ranks in members if group is not dist.GroupMember.NON_GROUP_MEMBER), reverse=True
    )


def count(num_ranks: int, dims: ParallelDims | None) -> tuple[int, int, int]:
    """Return the groups, the sockets per rank and the calls that create groups; dims: None for Megatron-Core's."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
    create = dist.new_group
    calls = 0

    def counted(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        return create(*args, **options)

    owners = (dist, dist.distributed_c10d, dist.device_mesh)
    with contextlib.ExitStack() as stack:
        for owner in owners:
            stack.enter_context(mock.patch.object(owner, "new_group", counted))
        if dims is None:
            create_megatron_groups()
        else:
            for _ in ("policy", "reference"):
                Mesh.create(dims, CPU).data_parallel_group()
    sizes = group_sizes()
    dist.destroy_process_group()
    return len(sizes), sum(size - 1 for size in sizes), calls


def create_megatron_groups() -> None:
    from thresher.engines.megatron import parallel
    from thresher.engines.megatron.declaration import MegatronSizes

    with mock.patch.object(parallel, "model_parallel_cuda_manual_seed"):
        parallel.create_groups(MegatronSizes(tp=8, pp=4))
    parallel.destroy_groups()


def real_rank(rank: int, num_ranks: int, path: str, sockets: Any) -> None:
    before = num_sockets()
    dist.init_process_group("gloo", store=dist.FileStore(path, num_ranks), rank=rank, world_size=num_ranks)
    world = num_sockets() - before
    group = Group(rank, num_ranks, dist.group.WORLD)
    for _ in ("policy", "reference"):
        mesh = Mesh.create(ParallelDims(tp=2, dp_shard=num_ranks // 2), CPU).data_parallel_group()
    meshes = num_sockets() - before
    for _ in range(2):  # the collectives of a run: sums and objects
        group.all_reduce([1.0])
        mesh.all_reduce([1.0])
        mesh.all_gather_object(rank)
        group.gather_object(rank)
    sockets.put((rank, world, meshes, num_sockets() - before))
    dist.barrier()


def num_sockets() -> int:
    links = (str(each.readlink()) for each in Path("/proc/self/fd").iterdir() if each.is_symlink())
    return sum(link.startswith("socket:") for link in links)


def run_real(num_ranks: int) -> list[tuple[int, ...]]:
    context = multiprocessing.get_context("fork")
    sockets = context.Queue()
    with tempfile.TemporaryDirectory() as directory:
        store = str(Path(directory) / "store")
        ranks = [context.Process(target=real_rank, args=(rank, num_ranks, store, sockets)) for rank in range(num_ranks)]
        for each in ranks:
            each.start()
        found = [sockets.get(timeout=120) for _ in ranks]
        for each in ranks:
            each.join()
    return sorted(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--real", action="store_true")
    parser.add_argument("--megatron", action="store_true")
    arguments = parser.parse_args()
    if arguments.real:
        for num_ranks in (4, 8, 16):
            found = run_real(num_ranks)
            for name, column in (("world", 1), ("with meshes", 2), ("after collectives", 3)):
                values = [each[column] for each in found]
                print(f"{num_ranks} ranks, {name}: {min(values)} to {max(values)} sockets per rank")
        return
    print("ranks | mesh | groups | sockets | calls | seconds")
    for num_ranks in (64, 256, 1024):
        for dims in [None] if arguments.megatron else meshes(num_ranks):
            started = time.perf_counter()
            groups, sockets, calls = count(num_ranks, dims)
            name = "Megatron-Core, tp 8 x pp 4" if dims is None else title(dims)
            print(f"{num_ranks} | {name} | {groups} | {sockets} | {calls} | {time.perf_counter() - started:.2f}")


if __name__ == "__main__":
    main()
