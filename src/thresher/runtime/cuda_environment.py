"""Environment of a process that computes on a GPU: allocator, flight recorder of NCCL, and the cores near the GPU.

Variables are set before CUDA starts. Those that the user has set are kept, also under their older names.
torch.numa binds only processes that torchrun starts; its parts are private and read fixed paths.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from thresher import durable

_PCI_DEVICES = Path("/sys/bus/pci/devices")
_NUMA_NODES = Path("/sys/devices/system/node")
# newest name first: torch reads the others too
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_RECORDER_SIZE = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_RECORDER_FILE = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_DUMP_ON_TIMEOUT = ("TORCH_NCCL_DUMP_ON_TIMEOUT",)


def prepare_cuda(device: torch.device, dump_prefix: Path) -> list[str]:
    """Set the environment of a process, then start CUDA on its GPU; return what was set, for its log.

    dump_prefix: path of the flight recorder's dumps, to which torch appends the rank. A CPU needs nothing.
    """
    if device.type != "cuda":
        return []
    variables = missing_variables(os.environ, dump_prefix)
    os.environ.update(variables)
    torch.cuda.set_device(device)
    notes = [f"environment for CUDA: {', '.join(f'{name}={value}' for name, value in variables.items())}"]
    return [*notes, bind_to_cores(numa_cores(pci_address(device)))]


def missing_variables(environ: Mapping[str, str], dump_prefix: Path) -> dict[str, str]:
    """Return the variables to set that `environ` has under none of their names."""
    wanted = {
        _ALLOCATOR: "expandable_segments:True",  # every micro-batch has another shape, which fragments fixed segments
        _RECORDER_SIZE: "2000",
        _DUMP_ON_TIMEOUT: "1",
        _RECORDER_FILE: str(dump_prefix),
    }
    return {names[0]: value for names, value in wanted.items() if not any(name in environ for name in names)}


def write_flight_record(path: Path) -> None:
    """Write NCCL's last collectives of this process, in the format of `torch.distributed.flight_recorder`."""
    record = torch._C._distributed_c10d._dump_nccl_trace()  # type: ignore[attr-defined]  # builds with NCCL have it
    durable.replace(path, record)  # never through a symlink


def pci_address(device: torch.device) -> str:
    """Return the PCI address of a GPU as sysfs writes it."""
    found: Any = torch.cuda.get_device_properties(device)  # torch's stubs lack these fields
    return f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"


def numa_cores(address: str, devices: Path = _PCI_DEVICES, nodes: Path = _NUMA_NODES) -> set[int]:
    """Return the cores of the NUMA node of a PCI device; none if the node is unknown or the machine has one."""
    try:
        node = int((devices / address / "numa_node").read_text())
        if node < 0 or len(list(nodes.glob("node[0-9]*"))) < 2:
            return set()
        return parse_cores((nodes / f"node{node}" / "cpulist").read_text())
    except (OSError, ValueError):
        return set()


def parse_cores(text: str) -> set[int]:
    """Parse a list of cores of the kernel: `0-3,8` is {0, 1, 2, 3, 8}."""
    cores: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return cores


def bind_to_cores(cores: set[int]) -> str:
    """Run every thread of this process on those of its cores that are in `cores`, if there are any; describe it."""
    chosen = cores & os.sched_getaffinity(0)
    if not chosen:
        return (
            "cores: not bound, because the NUMA node of the GPU is unknown, the only one, or not in the affinity mask"
        )
    for thread in Path("/proc/self/task").iterdir():  # new ones inherit the mask of the thread that starts them
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread.name), chosen)
    return f"cores: bound to {len(chosen)} cores of the NUMA node of the GPU"
