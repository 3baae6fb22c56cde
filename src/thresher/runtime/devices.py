"""The device of a process: a GPU that is mapped must work. No process falls back to the CPU unless it is told to."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import torch
from torch._C._distributed_c10d import Store

from thresher.errors import ResourceError, UserError

CPU = torch.device("cpu")
# the only accepted value is cpu: a config with GPUs is tried on machines without them
DEVICE_VARIABLE = "THRESHER_DEVICE"


def claim_gpu(worker: str, index: int) -> torch.device:
    """Return GPU `index` of this node, or raise if torch cannot use it. worker: its name, for the message."""
    if uses_cpu_instead():
        return CPU
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if index >= count:
        raise ResourceError(
            f"{worker} on {socket.gethostname()} needs GPU {index}, but {describe_cuda(count)}; check nvidia-smi and "
            "the installation of torch on that node, change device_mapping, or remove it and set num_workers to train "
            "on CPUs"
        )
    return torch.device("cuda", index)


def uses_cpu_instead() -> bool:
    """Return whether the environment replaces mapped GPUs by the CPU."""
    value = os.environ.get(DEVICE_VARIABLE)
    if value not in (None, "", "cpu"):
        raise UserError(f"{DEVICE_VARIABLE} is {value!r}; set it to cpu, or unset it and use device_mapping")
    return value == "cpu"


def describe_cuda(count: int) -> str:
    """Say what torch has found on this node."""
    if torch.version.cuda is None:
        return f"its torch {torch.__version__} is built without CUDA"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    shown = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible})"
    return f"torch finds {count} GPU{'' if count == 1 else 's'} there{shown}"


def check_same_device_type(store: Store, rank: int, size: int, device: torch.device, timeout: timedelta) -> None:
    """Raise on all ranks if some compute on GPUs and some on the CPU; called before the process group starts.

    Such ranks would choose different backends and wait for each other until a timeout.
    """
    store.set(f"device/{device.type}", f"rank {rank} of {size} on {socket.gethostname()}")
    if int(store.add("device/num_ranks", 1)) == size:
        store.set("device/complete", "")
    store.wait(["device/complete"], timeout)
    if store.check(["device/cpu", "device/cuda"]):
        gpu, cpu = (store.get(f"device/{kind}").decode() for kind in ("cuda", "cpu"))
        raise ResourceError(
            f"{cpu} has no GPU that torch can use, but {gpu} has one; check nvidia-smi on the first node, or hide the "
            "GPUs with CUDA_VISIBLE_DEVICES= to train on CPUs"
        )
