"""The timeout of collectives changes while a process group exists, in all its groups but that of background saves."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.paths import ROOT

pytestmark = pytest.mark.distributed

# rank 1 never enters the all-reduce of the group under test
PROGRAM = """
import sys, time
from datetime import timedelta
import torch, torch.distributed as dist
from thresher.distributed.groups import Group
from thresher.distributed.timeouts import limit_collectives
from thresher.runtime.devices import CPU
from thresher.runtime.process_group import init_process_group

rank, path = int(sys.argv[1]), sys.argv[2]
world = init_process_group(rank, 2, dist.FileStore(path, 2), "", CPU)
subgroup = Group(rank, 2, dist.new_group([0, 1]))
background = world.clone_for_thread()
assert world.all_reduce([1.0])[0] == [2.0]
limit_collectives(timedelta(seconds=1), on_hosts=False)  # gloo keeps its 30 minutes
limits = lambda: [each.group._get_backend(CPU).options._timeout.seconds for each in (world, subgroup, background)]
assert limits() == [1800, 1800, 1800], limits()
limit_collectives(timedelta(seconds=1), on_hosts=True)
assert limits() == [1, 1, 1800], limits()
assert background.all_reduce([1.0])[0] == [2.0]
if rank == 0:
    started = time.monotonic()
    try:
        subgroup.all_reduce([1.0])
    except RuntimeError as error:
        assert "timed out" in str(error).lower(), error
        print(f"ended after {time.monotonic() - started:.0f} s")
else:
    time.sleep(8)
"""


def test_a_collective_that_a_rank_never_enters_ends_after_the_timeout(tmp_path):
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), str(tmp_path / "store")],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        output, errors = processes[0].communicate(timeout=120)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert output.startswith("ended after "), errors
    assert int(output.split()[2]) <= 5
