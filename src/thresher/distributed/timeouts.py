"""Timeouts of collectives: long while ranks may legitimately wait for each other, short inside steps after warm-up."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist

# for a peer that hangs; the driver or the launcher notices a dead one immediately
PEER_TIMEOUT = timedelta(minutes=30)
# description of groups whose collectives wait for the disk
BACKGROUND = "background"


def limit_collectives(timeout: timedelta, *, on_hosts: bool) -> None:
    """Set the timeout of the collectives that start from now on, in all groups of this process.

    NCCL ends a process whose collective exceeds it, and its flight recorder writes the last collectives to a file.
    on_hosts: also of gloo, which raises an error.
    """
    for backend in _backends(on_hosts=on_hosts):
        backend._set_default_timeout(timeout)


def _backends(*, on_hosts: bool) -> Iterator[Any]:
    if not dist.is_initialized():
        return
    for group in list(dist.distributed_c10d._world.pg_map):
        if group.group_desc == BACKGROUND:
            continue
        found = {group._get_backend(device) for device in group._device_types}
        if dist.is_nccl_available():
            yield from (each for each in found if isinstance(each, dist.ProcessGroupNCCL))
        if on_hosts and dist.is_gloo_available():
            yield from (each for each in found if isinstance(each, dist.ProcessGroupGloo))
