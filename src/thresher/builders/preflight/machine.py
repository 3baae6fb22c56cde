"""Checks of a machine that computes: file locks, the limit of open files, and shared memory. Imports no torch."""

from __future__ import annotations

import contextlib
import resource
import shutil
import tempfile
from pathlib import Path

from rich import filesize

from thresher import durable
from thresher.builders.preflight.files import Messages, existing_parent, problems_of
from thresher.config import DPOConfig

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108
# what NVIDIA recommends for containers that run NCCL; Docker's default is 64 MB
_SHARED_BY_NCCL = 1 << 30
# if it has less, Ray puts its objects on the disk
_SHARED_BY_RAY = 1 << 28
# gloo keeps a socket per rank and group: the world, the one that saves, and those of the mesh. The rest is for files
_SOCKETS_PER_RANK, _OTHER_FILES = 4, 1024


def check_locks(config: DPOConfig) -> Messages:
    """Lock a file without a name where the run writes: some network file systems have no locks."""
    directory = existing_parent(Path(config.output_dir).expanduser())
    # a directory that cannot be written is a different problem
    with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=directory) as file:
        yield from problems_of(durable.lock, file.fileno())


def check_here(config: DPOConfig) -> Messages:
    """Check this machine; the machines of a cluster are checked when workers start on them."""
    if config.ray_address is None:
        yield from check_node(config)


def check_node(config: DPOConfig) -> Messages:
    """Warn about limits of this machine that the ranks of a run will exceed."""
    ranks = config.actor_train.num_processes
    needed = _OTHER_FILES + _SOCKETS_PER_RANK * ranks
    _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    if ranks > 1 and limit != resource.RLIM_INFINITY and limit < needed:
        yield UserWarning(
            f"each of {ranks:,} ranks opens up to {needed:,} files and sockets, but a process may open {limit:,} here; "
            "raise the hard limit on every node: `ulimit -Hn`, systemd's LimitNOFILE, or --ulimit nofile of a container"
        )
    uses_nccl = ranks > 1 and bool(config.actor_train.device_mapping or config.runtime == "torchrun")
    wanted = _SHARED_BY_NCCL if uses_nccl else _SHARED_BY_RAY if config.uses_ray else 0
    if _SHARED_MEMORY.is_dir() and (free := shutil.disk_usage(_SHARED_MEMORY).free) < wanted:
        effect = "NCCL fails without it" if uses_nccl else "Ray uses the disk instead"
        yield UserWarning(
            f"{_SHARED_MEMORY} has {filesize.decimal(free)} free, and ranks of a machine share memory there: {effect}; "
            "make it larger: --shm-size=1g or more of a container, or `mount -o remount,size=2g /dev/shm`"
        )
