"""What a process needs before it computes: descriptors, its device, the environment of CUDA, and its process group.

A GPU that is mapped must work: a process falls back to the CPU only with THRESHER_DEVICE=cpu. Environment variables are
set before CUDA starts; those that the user has set are kept, even under their older names. torch.numa binds only
processes that torchrun starts; its parts are private and read fixed paths.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import socket
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from thresher import durable
from thresher.data.store.cache import chosen_cache_dir, user_cache_dir
from thresher.distributed.groups import PEER_TIMEOUT, Group
from thresher.errors import ResourceError, UserError
from thresher.observability.machine import processor

CPU = torch.device("cpu")
# the only accepted value is cpu: a config with GPUs is tried on machines without them
DEVICE_VARIABLE = "THRESHER_DEVICE"
_PCI_DEVICES = Path("/sys/bus/pci/devices")
_NUMA_NODES = Path("/sys/devices/system/node")

_compile_variables: dict[str, str] = {}  # set by use_compile_cache, for an earlier run of this process


def raise_descriptor_limit() -> None:
    """Raise this process's soft limit of open files to the hard one; `check_node` warns if that is too low."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # macOS has a lower limit than it reports
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def claim_gpu(worker: str, index: int) -> torch.device:
    """Return GPU `index` of this node, or raise if torch cannot use it. worker: its name, for the message."""
    if uses_cpu_instead():
        return CPU
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if index >= count:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        shown = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible})"
        found = f"torch finds {count} GPU{'' if count == 1 else 's'} there{shown}"
        if torch.version.cuda is None:
            found = f"its torch {torch.__version__} is built without CUDA"
        raise ResourceError(
            f"{worker} on {socket.gethostname()} needs GPU {index}, but {found}; check nvidia-smi and the installation "
            "of torch on that node, change device_mapping, or remove it and set num_workers to train on CPUs"
        )
    return torch.device("cuda", index)


def uses_cpu_instead() -> bool:
    """Return whether the environment replaces mapped GPUs by the CPU."""
    value = os.environ.get(DEVICE_VARIABLE)
    if value not in (None, "", "cpu"):
        raise UserError(f"{DEVICE_VARIABLE} is {value!r}; set it to cpu, or unset it and use device_mapping")
    return value == "cpu"


def check_same_device_type(store: Store, rank: int, size: int, device: torch.device, timeout: timedelta) -> None:
    """Raise on all ranks if some compute on GPUs and some on the CPU: they would wait for each other in vain."""
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


def prepare_cuda(device: torch.device, dump_prefix: Path) -> list[str]:
    """Set the environment of a process, then start CUDA on its GPU; return what was set, for its log."""
    if device.type != "cuda":
        return []
    variables = missing_variables(os.environ, dump_prefix)
    os.environ.update(variables)
    torch.cuda.set_device(device)
    found: Any = torch.cuda.get_device_properties(device)  # torch's stubs lack these fields
    pci_address = f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"  # as sysfs writes it
    environment = ", ".join(f"{name}={value}" for name, value in variables.items())
    return [f"GPU: {pci_address}", f"environment for CUDA: {environment}", bind_to_cores(numa_cores(pci_address))]


def missing_variables(environ: Mapping[str, str], dump_prefix: Path) -> dict[str, str]:
    """Return the variables to set that `environ` has under none of their names."""
    wanted = {  # by newest name first: torch reads the others too
        # every micro-batch has a different shape, which fragments fixed segments
        ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"): "expandable_segments:True",
        ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"): "2000",
        ("TORCH_NCCL_DUMP_ON_TIMEOUT",): "1",
        ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"): str(dump_prefix),  # torch appends the rank
    }
    return {names[0]: value for names, value in wanted.items() if not any(name in environ for name in names)}


def use_compile_cache(cache_dir: str | None) -> str:
    """Let Inductor and Triton keep compiled code where ranks of this user and later starts find it; describe it.

    The code is pickled, so that whoever can write it can run code: it is kept in directories of this user alone.
    """
    for variable, value in _compile_variables.items():
        if os.environ.get(variable) == value:
            del os.environ[variable]
    _compile_variables.clear()
    if kept := os.environ.get("TORCHINDUCTOR_CACHE_DIR"):
        return f"compiled code: {kept}, by TORCHINDUCTOR_CACHE_DIR"
    # nodes that share the directory may have different hardware, and Inductor names CPU code by its instructions alone
    name = torch.cuda.get_device_name() if torch.cuda.is_initialized() else processor()
    kind = re.sub(r"[^\w.+-]+", "-", f"torch-{torch.__version__}-{name}")
    for root in dict.fromkeys(filter(None, (chosen_cache_dir(cache_dir), user_cache_dir()))):
        path = root.absolute() / "compiled" / f"{kind}-uid-{os.getuid()}"
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.mkdir(mode=0o700, exist_ok=True)
            if durable.is_private_directory(path):
                variables = {"TORCHINDUCTOR_CACHE_DIR": str(path), "TRITON_CACHE_DIR": str(path / "triton")}
                _compile_variables.update({name: value for name, value in variables.items() if name not in os.environ})
                os.environ.update(_compile_variables)
                return f"compiled code: {path}"
    return "compiled code: not shared, because no cache directory belongs to this user alone"


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
    """Run every thread of this process on its cores that are in `cores`, if it has any of them; describe it."""
    chosen = cores & os.sched_getaffinity(0)
    if not chosen:
        return (
            "cores: not bound, because the NUMA node of the GPU is unknown, the only one, or not in the affinity mask"
        )
    for thread in Path("/proc/self/task").iterdir():  # new ones inherit the mask of the thread that starts them
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread.name), chosen)
    return f"cores: bound to {len(chosen)} cores of the NUMA node of the GPU"


def init_process_group(rank: int, size: int, store: Store, address: str, device: torch.device) -> Group:
    """Join the process group; address is this node's own in the network of the ranks."""
    check_same_device_type(store, rank, size, device, PEER_TIMEOUT)
    for interface, addresses in psutil.net_if_addrs().items():
        if address in {each.address for each in addresses}:
            # the default is what the host name resolves to, which may be loopback on a cluster, or the reverse
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
    is_gpu = device.type == "cuda"
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if is_gpu else "gloo",
        store=store,
        rank=rank,
        world_size=size,
        timeout=PEER_TIMEOUT,
        device_id=device if is_gpu else None,  # NCCL connects now, and never guesses the GPU of a rank
    )
    return Group(rank, size, dist.group.WORLD)
