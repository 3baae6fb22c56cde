"""The timeout of collectives changes while a process group exists, in all its groups but that of background saves."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest

pytestmark = pytest.mark.distributed


def enter_a_collective_alone(rank: int, path: str) -> float:
    """Return how long rank 0 waits in an all-reduce that rank 1 never enters."""
    import torch.distributed as dist

    from thresher.distributed.groups import Group, limit_collectives
    from thresher.runtime.devices import CPU, init_process_group

    world = init_process_group(rank, 2, dist.FileStore(path, 2), "", CPU)
    subgroup = Group(rank, 2, dist.new_group([0, 1]))
    background = world.clone_for_thread()
    groups = [each.group._get_backend(CPU).options for each in (world, subgroup, background)]
    assert world.all_reduce([1.0])[0] == [2.0]
    limit_collectives(timedelta(seconds=1))  # gloo keeps its 30 minutes
    assert [each._timeout.seconds for each in groups] == [1800, 1800, 1800]
    limit_collectives(timedelta(seconds=1), dist.ProcessGroupGloo)  # in place of NCCL's, which needs a GPU
    assert [each._timeout.seconds for each in groups] == [1, 1, 1800]
    assert background.all_reduce([1.0])[0] == [2.0]
    if rank == 1:
        time.sleep(600)
    started = time.monotonic()
    with pytest.raises(RuntimeError, match=r"(?i)timed out"):
        subgroup.all_reduce([1.0])
    return time.monotonic() - started


def test_a_collective_that_a_rank_never_enters_ends_after_the_timeout(ray_here, tmp_path):
    import ray

    remote = ray.remote(num_cpus=0, max_calls=1)(enter_a_collective_alone)  # a process for each rank, for one call
    first, second = (remote.remote(rank, str(tmp_path / "store")) for rank in (0, 1))
    assert 1 <= ray.get(first, timeout=120) < 6
    ray.cancel(second, force=True)
