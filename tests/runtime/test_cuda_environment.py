"""The environment of a process with a GPU: the user's variables win, and its cores are those of the GPU's NUMA node."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from thresher.runtime.devices import missing_variables, numa_cores, parse_cores, prepare_cuda

PREFIX = Path("/run/logs/workers/actor_train-nccl-")
ALL = {
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    "TORCH_FR_BUFFER_SIZE": "2000",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    "TORCH_FR_DUMP_TEMP_FILE": str(PREFIX),
}


def test_a_process_with_a_gpu_gets_the_allocator_and_the_flight_recorder():
    assert missing_variables({"HOME": "/root"}, PREFIX) == ALL


@pytest.mark.parametrize(
    ("users", "not_set"),
    [
        ("PYTORCH_ALLOC_CONF", "PYTORCH_ALLOC_CONF"),
        ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"),
        ("TORCH_FR_BUFFER_SIZE", "TORCH_FR_BUFFER_SIZE"),
        ("TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_FR_BUFFER_SIZE"),
        ("TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_NCCL_DUMP_ON_TIMEOUT"),
        ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_FR_DUMP_TEMP_FILE"),
        ("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "TORCH_FR_DUMP_TEMP_FILE"),
    ],
)
@pytest.mark.parametrize("value", ["", "0"])
def test_variables_of_the_user_are_kept_under_any_of_their_names(users, not_set, value):
    expected = {name: each for name, each in ALL.items() if name != not_set}
    assert missing_variables({users: value}, PREFIX) == expected


def test_torch_knows_the_names_of_the_flight_recorder():
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    content = library.read_bytes()
    assert all(f"{name}\0".encode() in content for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_FR_DUMP_TEMP_FILE"))


def test_a_process_on_the_cpu_is_left_as_it_is():
    before = dict(os.environ), os.sched_getaffinity(0)
    assert prepare_cuda(torch.device("cpu"), PREFIX) == []
    assert (dict(os.environ), os.sched_getaffinity(0)) == before


@pytest.mark.parametrize(
    ("text", "cores"),
    [("0-3,8\n", {0, 1, 2, 3, 8}), ("5", {5}), ("\n", set()), ("0-1,4-5", {0, 1, 4, 5})],
)
def test_lists_of_cores_are_those_of_the_kernel(text, cores):
    assert parse_cores(text) == cores


ADDRESS = "0000:dc:00.0"


@pytest.fixture
def sysfs(tmp_path) -> tuple[Path, Path]:
    """A machine with a GPU on the second of two NUMA nodes."""
    devices, nodes = tmp_path / "devices", tmp_path / "node"
    for name, content in {
        devices / ADDRESS / "numa_node": "1\n",
        nodes / "node0" / "cpulist": "0-3\n",
        nodes / "node1" / "cpulist": "4-7,12-15\n",
    }.items():
        name.parent.mkdir(parents=True)
        name.write_text(content)
    return devices, nodes


def test_the_cores_are_those_of_the_numa_node_of_the_gpu(sysfs):
    assert numa_cores(ADDRESS, *sysfs) == {4, 5, 6, 7, 12, 13, 14, 15}


@pytest.mark.parametrize("node", ["-1\n", "7\n", "none\n", ""])
def test_an_unknown_numa_node_binds_nothing(sysfs, node):
    (sysfs[0] / ADDRESS / "numa_node").write_text(node)
    assert numa_cores(ADDRESS, *sysfs) == set()


def test_a_gpu_or_a_machine_without_numa_binds_nothing(sysfs, tmp_path):
    assert numa_cores("0000:01:00.0", *sysfs) == set()
    assert numa_cores(ADDRESS, tmp_path / "nothing", tmp_path / "nothing") == set()
    (sysfs[1] / "node0" / "cpulist").unlink()
    (sysfs[1] / "node0").rmdir()
    assert numa_cores(ADDRESS, *sysfs) == set()  # one node: every core is near


BIND = """
import os, threading
from thresher.runtime.devices import bind_to_cores
core = min(os.sched_getaffinity(0))
leave = threading.Event()
other = threading.Thread(target=leave.wait)
other.start()
unknown = bind_to_cores({100_000})
before = os.sched_getaffinity(other.native_id)
bound = bind_to_cores({core, 100_000})
print(unknown.startswith("cores: not bound"), before == os.sched_getaffinity(0) or len(before) > 1)
print(bound, os.sched_getaffinity(0) == os.sched_getaffinity(other.native_id) == {core})
leave.set()
"""


def test_all_threads_are_bound_to_the_allowed_cores_and_none_if_there_are_none():
    output = subprocess.run([sys.executable, "-c", BIND], capture_output=True, text=True, check=True).stdout
    assert output.splitlines() == ["True True", "cores: bound to 1 cores of the NUMA node of the GPU True"]
