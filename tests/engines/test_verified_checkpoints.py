"""The ranks hash each file of a checkpoint once together, and all learn of a damaged one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.support.engines import parity
from tests.support.engines.saved_runs import NUM_STEPS, Run, train
from thresher.checkpoint import manifest
from thresher.checkpoint.manifest import find_damage, read_manifest
from thresher.distributed.groups import SINGLE_PROCESS, Group
from thresher.distributed.mesh import ParallelDims
from thresher.errors import CheckpointError

pytestmark = pytest.mark.distributed

SPLIT = ParallelDims(dp_shard=2, tp=2)
LAST = f"step-{NUM_STEPS:08d}"


@pytest.fixture(scope="module")
def saved(pool_of, tmp_path_factory) -> Path:
    model = parity.save_model(tmp_path_factory.mktemp("model"), "llama", 0)
    run = Run(model, tmp_path_factory.mktemp("saved"), SPLIT, saves_at=(NUM_STEPS,))
    pool_of(4).run(train, run)
    return run.root / LAST


def hash_and_count(directory: Path) -> tuple[list[str], list[str]]:
    """The damage that a rank reports, and the files that it has hashed."""
    hashed: list[str] = []
    record = manifest._record

    def counting(path: Path) -> manifest.FileRecord:
        hashed.append(path.name)
        return record(path)

    manifest._record = counting
    try:
        damage = find_damage(directory, Group(dist.get_rank(), dist.get_world_size(), dist.group.WORLD))
    except CheckpointError as error:
        damage = [str(error)]
    finally:
        manifest._record = record
    return damage, hashed


def test_each_file_is_hashed_by_one_rank_and_shards_by_the_rank_that_reads_them(saved, pool_of):
    found = pool_of(4).run(hash_and_count, saved)

    files = read_manifest(saved).files
    assert sorted(name for _, hashed in found for name in hashed) == sorted(files)
    assert all(not damage for damage, _ in found)
    for rank, (_, hashed) in enumerate(found):
        shards = {f"{stem}-{rank + 1:05d}-of-00004.safetensors" for stem in ("weights", "optimizer")}
        assert shards <= set(hashed)


def test_fewer_ranks_share_the_files(saved, pool_of):
    found = pool_of(2).run(hash_and_count, saved)

    files = read_manifest(saved).files
    sizes = [sum(files[name].size for name in hashed) for _, hashed in found]
    assert sum(sizes) == sum(record.size for record in files.values())
    assert abs(sizes[0] - sizes[1]) <= max(record.size for record in files.values())
    assert find_damage(saved, SINGLE_PROCESS) == []


def test_all_ranks_report_what_one_of_them_finds(saved, pool_of, tmp_path):
    copy = shutil.copytree(saved, tmp_path / LAST)
    for name in ("optimizer-00003-of-00004.safetensors", "rng.json"):
        content = bytearray((copy / name).read_bytes())
        content[-1] ^= 1
        (copy / name).write_bytes(content)

    found = pool_of(4).run(hash_and_count, copy)

    expected = ["optimizer-00003-of-00004.safetensors does not match its digest", "rng.json does not match its digest"]
    assert [damage for damage, _ in found] == [expected] * 4


def test_a_file_that_a_worker_cannot_read_is_an_error_on_all_ranks(saved, pool_of, tmp_path):
    copy = shutil.copytree(saved, tmp_path / LAST)
    (copy / "weights-00004-of-00004.safetensors").unlink()  # as on a node that does not share the file system

    found = pool_of(4).run(hash_and_count, copy)

    (message,) = {text for damage, _ in found for text in damage}
    assert "weights-00004-of-00004.safetensors (No such file or directory); all workers must resume from" in message
