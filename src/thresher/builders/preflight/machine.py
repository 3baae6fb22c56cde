"""Checks of a machine that computes: file locks, open files, shared memory, clocks. Imports no torch."""

from __future__ import annotations

import contextlib
import resource
import shutil
import socket
import tempfile
from collections.abc import Mapping
from pathlib import Path

from thresher import durable
from thresher.builders.preflight.files import Messages, existing_parent, problems_of
from thresher.config import DPOConfig

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108
# what NVIDIA recommends for containers that run NCCL; Docker's default is 64 MB
_SHARED_BY_NCCL = 1 << 30
# if it has less, Ray puts its objects on the disk
_SHARED_BY_RAY = 1 << 28
# gloo keeps a socket to every rank for the world, for all meshes together and for background saves; the rest is for
# files, such as mapped shards
_SOCKETS_PER_RANK, _OTHER_FILES = 3, 1024
_MAX_CLOCK_OFFSET = 5.0  # in seconds; locks and leases allow a minute


def check_locks(config: DPOConfig) -> Messages:
    """Lock a file without a name where the run writes: some network file systems have no locks."""
    directory = existing_parent(Path(config.output_dir).expanduser())
    # a directory that cannot be written is a different problem
    with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=directory) as file:
        yield from problems_of(durable.lock, file.fileno())


def check_here(config: DPOConfig) -> Messages:
    """Check this machine; what a launcher or a cluster starts checks its machine when it has found its device."""
    if config.ray_address is None and config.runtime != "torchrun":
        yield from check_node(config, uses_gpu=bool(config.actor_train.device_mapping))


def check_node(config: DPOConfig, *, uses_gpu: bool) -> Messages:
    """Warn about limits of this machine that the ranks of a run will exceed."""
    ranks, host = config.actor_train.num_processes, socket.gethostname()
    needed = _OTHER_FILES + _SOCKETS_PER_RANK * ranks
    _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    if ranks > 1 and limit != resource.RLIM_INFINITY and limit < needed:
        yield UserWarning(
            f"each of {ranks:,} ranks opens up to {needed:,} files and sockets, but a process may open {limit:,} on "
            f"{host}; raise the hard limit on every node: `ulimit -Hn`, systemd's LimitNOFILE, or --ulimit nofile of a "
            "container; or set TORCH_GLOO_LAZY_INIT=1"
        )
    uses_nccl = uses_gpu and ranks > 1
    wanted = _SHARED_BY_NCCL if uses_nccl else _SHARED_BY_RAY if config.uses_ray else 0
    if _SHARED_MEMORY.is_dir() and (free := shutil.disk_usage(_SHARED_MEMORY).free) < wanted:
        effect = "NCCL fails without it" if uses_nccl else "Ray uses the disk instead"
        yield UserWarning(
            f"{_SHARED_MEMORY} of {host} has {free / 1e6:.0f} MB free, and ranks of a machine share memory there: "
            f"{effect}; make it larger: --shm-size=1g or more of a container, or `mount -o remount,size=2g /dev/shm`"
        )


def check_clocks(offsets: Mapping[str, float], other: str) -> list[str]:
    """Return a warning for each node whose clock is ahead of another one by too many seconds, or behind it."""
    return [
        f"the clock of {node} is {abs(offset):.0f} s {'ahead of' if offset > 0 else 'behind'} that of {other}: times "
        "in logs, and how old a lock or a file is, are wrong by that; synchronize the clocks (NTP)"
        for node, offset in offsets.items()
        if abs(offset) > _MAX_CLOCK_OFFSET
    ]
