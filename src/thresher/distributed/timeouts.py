"""Limits of collectives: long while ranks may wait for each other, short in steps after warm-up; lost connections."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

# for a peer that hangs; the driver or the launcher notices a dead one immediately
PEER_TIMEOUT = timedelta(minutes=30)
# description of groups whose collectives wait for the disk
BACKGROUND = "background"
_NCCL = getattr(dist, "ProcessGroupNCCL", None)  # torch for CPUs has none


def limit_collectives(timeout: timedelta, backend_type: type | None = _NCCL) -> None:
    """Set the timeout of NCCL's collectives that start from now on, in all groups of this process.

    NCCL ends a process whose collective exceeds it, and its flight recorder writes the last collectives to a file.
    Gloo's sends and receives ignore a new limit; ranks that wait in them are found by missing progress.
    """
    if backend_type is None or not dist.is_initialized():
        return
    for group in list(dist.distributed_c10d._world.pg_map):
        if group.group_desc != BACKGROUND:
            for backend in {group._get_backend(device) for device in group._device_types}:
                if isinstance(backend, backend_type):
                    backend._set_default_timeout(timeout)


def is_lost_connection(error: object) -> bool:
    """Return whether a collective or the store failed because another process has ended."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))
