"""Prepare a process for DeepSpeed: its accelerator, its process group, and no compiler at run time on a CPU."""

from __future__ import annotations

import logging
import os
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from thresher.distributed.groups import DataParallelGroup, Group
from thresher.errors import UserError

_JOINED = "thresher_world"  # attribute of DeepSpeed's backend: the default group that it was created for


def import_deepspeed(device: torch.device) -> Any:
    """Import DeepSpeed for a device; DeepSpeed reads the device from the environment, at its import and later."""
    if device.type == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"  # otherwise it looks for accelerators of every vendor
    os.environ["LOCAL_RANK"] = str(device.index or 0)  # of the device, as torchrun sets it
    os.environ.setdefault("DEEPSPEED_LOG_LEVEL", "warning")
    import deepspeed

    accelerator = str(deepspeed.accelerator.get_accelerator().device_name())
    if accelerator != device.type:  # another library has imported it before
        raise UserError(
            f"DeepSpeed uses the device {accelerator}, and the model is on {device.type}; set the environment variable "
            f"DS_ACCELERATOR={device.type}"
        )
    _silence(deepspeed.utils.logger)
    if device.type == "cpu":
        # collectives in shared memory, which DeepSpeed would compile at start-up for minutes; gloo serves as well
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    _join_process_group(deepspeed, device)
    return deepspeed


def data_parallel_group(world: Group) -> DataParallelGroup:
    """The data-parallel ranks, which are all processes; a backward is a collective call at every ZeRO stage."""
    return DataParallelGroup(world.rank, world.size, world.group, needs_lockstep=True, reduces_gradients=False)


def _silence(logger: logging.Logger) -> None:
    """Keep warnings that a user can act on."""
    logger.setLevel(logging.WARNING)
    logger.addFilter(_can_be_acted_on)
    # collectives that this version of torch renames
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)


def _can_be_acted_on(record: logging.LogRecord) -> bool:
    return "untested optimizer" not in record.getMessage()  # a subclass of torch's AdamW


def _join_process_group(deepspeed: Any, device: torch.device) -> None:
    if not dist.is_initialized():  # a single process; DeepSpeed needs a group of one
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    comm: Any = deepspeed.comm.comm
    if comm.cdb is not None and vars(comm.cdb).get(_JOINED) is not dist.group.WORLD:
        # a group that has been destroyed since, of an earlier run in this process
        deepspeed.utils.groups._release_process_group_references()
        comm.cdb = None
    if comm.cdb is None:
        deepspeed.comm.init_distributed(dist_backend=dist.get_backend(), auto_mpi_discovery=False, verbose=False)
        setattr(comm.cdb, _JOINED, dist.group.WORLD)
