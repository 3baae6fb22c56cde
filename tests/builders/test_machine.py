"""What the preflight finds on this machine: file locks, the limit of open files, shared memory."""

from __future__ import annotations

import errno
import os
import resource
import socket
import subprocess
import sys
import textwrap

import pytest

from thresher import durable
from thresher.builders.preflight.machine import check_clocks, check_here, check_locks, check_node
from thresher.config import parse_config

HOST = socket.gethostname()
PRINT = """
import sys
from thresher.builders.preflight import machine
from thresher.config import parse_config

config = parse_config({"pretrain": "m", "runtime": "ray", "actor_train": {"num_workers": 2048}})
for uses_gpu in (False, True):
    print(*machine.check_node(config, uses_gpu=uses_gpu))
"""


def config_of(num_workers: int, **values: object):
    return parse_config({"pretrain": "m", "runtime": "ray", "actor_train": {"num_workers": num_workers}} | values)


@pytest.mark.parametrize(("limit", "warns"), [(7167, True), (7168, False)])
def test_a_limit_of_open_files_below_the_needs_of_a_rank_is_a_warning(limit, warns):
    def lower() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, limit))

    done = subprocess.run([sys.executable, "-c", PRINT], preexec_fn=lower, capture_output=True, text=True, check=True)
    expected = f"each of 2,048 ranks opens up to 7,168 files and sockets, but a process may open {limit:,} on {HOST}; "
    assert (expected in done.stdout) is warns, done.stdout


def test_small_shared_memory_is_a_warning_before_nccl_or_ray_find_it():
    """Mounted in a namespace of its own, over the shared memory of this machine."""
    script = f"mount -t tmpfs -o size=64m tmpfs /dev/shm && exec {sys.executable} -c '{textwrap.dedent(PRINT)}'"
    command = ["unshare", "--map-root-user", "--user", "--mount", "sh", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode and ("unshare" in done.stderr or "mount" in done.stderr):
        pytest.skip(f"no mount namespace: {done.stderr.strip()}")
    for effect in ("Ray uses the disk", "NCCL fails"):
        expected = f"/dev/shm of {HOST} has 67 MB free, and ranks of a machine share memory there: {effect}"
        assert expected in done.stdout


def test_a_file_system_without_locks_is_a_problem_of_the_preflight(tmp_path, monkeypatch):
    """No file system here lacks them; Lustre without `-o flock` raises this."""

    def no_locks(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    config = config_of(1, output_dir=str(tmp_path / "out"))
    assert not list(check_locks(config))
    monkeypatch.setattr(durable.fcntl, "flock", no_locks)
    (problem,) = check_locks(config)
    assert "has no file locks (Function not implemented); mount it with them (Lustre: `-o flock`)" in str(problem)
    assert str(tmp_path) in str(problem)
    assert not list(tmp_path.iterdir())


def test_the_machines_of_a_cluster_are_checked_by_its_workers(monkeypatch):
    here, cluster = config_of(100_000_000), config_of(100_000_000, ray_address="10.0.0.1:6379")
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] == resource.RLIM_INFINITY:
        pytest.skip("no limit of open files")
    assert list(map(str, check_here(here))) == list(map(str, check_node(cluster, uses_gpu=False)))
    assert not list(check_here(cluster))
    assert not list(check_here(here.model_copy(update={"runtime": "torchrun"})))


def test_a_clock_is_a_warning_if_it_is_off_by_more_than_5_seconds():
    behind, ahead = check_clocks({"a": 4.9, "b": -6.2, "c": 60.0}, "the driver")
    assert behind.startswith("the clock of b is 6 s behind that of the driver: ")
    assert ahead.startswith("the clock of c is 60 s ahead of that of the driver: ")
