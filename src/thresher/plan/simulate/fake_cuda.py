"""A CUDA device without a GPU, for tensors that have shapes and no values.

A build of torch with CUDA needs only the functions of `pretend_one_gpu`. A build without it also needs a device guard
in C++, which `compile_guard` compiles on first use and `load_guard` loads before torch is imported.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from thresher.errors import UserError

_SOURCE = Path(__file__).with_name("fake_cuda.cpp")
# registered as long as they are referred to
_KERNELS: list[Any] = []


def compile_guard(directory: Path) -> Path:
    """Compile the device guard for the installed torch, unless it is in the directory already."""
    torch_directory = _torch_directory()
    version = (torch_directory / "version.py").read_bytes()
    digest = hashlib.sha256(version + _SOURCE.read_bytes() + sys.version.encode()).hexdigest()[:16]
    library = directory / f"fake_cuda-{digest}.so"
    if library.exists():
        return library
    compiler = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    if compiler is None:
        raise UserError(
            "--simulate needs a C++ compiler with a build of torch that has no CUDA; install g++, use a CUDA build of "
            "torch, or plan without --simulate"
        )
    directory.mkdir(parents=True, exist_ok=True)
    partial = library.with_suffix(f".{os.getpid()}")
    options = [
        "-std=c++20",
        "-O1",
        "-shared",
        "-fPIC",
        f"-I{torch_directory / 'include'}",
        f"-L{torch_directory / 'lib'}",
    ]
    command = [compiler, *options, str(_SOURCE), "-lc10", "-ltorch_cpu", "-o", str(partial)]
    compiled = subprocess.run(command, capture_output=True, text=True, check=False)
    if compiled.returncode:
        raise UserError(
            f"the device guard of --simulate does not compile with {compiler} for this torch; plan without --simulate. "
            f"The compiler says: {compiled.stderr.strip()[-500:]}"
        )
    partial.replace(library)  # whole, even if two processes compile at once
    return library


def load_guard(library: Path) -> None:
    """Load the compiled device guard; before torch, which asks once whether there are CUDA hooks."""
    if "torch" in sys.modules:
        raise RuntimeError("the device guard must be loaded before torch is imported")
    ctypes.CDLL(str(_torch_directory() / "lib" / "libtorch_cpu.so"), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def _torch_directory() -> Path:
    found = importlib.util.find_spec("torch")
    return Path(str(found and found.origin)).parent


class _Event:
    """An event that has always happened."""

    def __init__(self, *_settings: Any, **_options: Any):
        pass

    def record(self, *_stream: Any) -> _Event:
        return self

    def query(self) -> bool:
        return True

    def _do_nothing(self, *_arguments: Any) -> None:
        pass

    wait = synchronize = _do_nothing


class _Stream:
    """The one stream of the device."""

    stream_id = device_index = cuda_stream = 0
    device_type = 1

    def __init__(self, *_settings: Any, **_options: Any):
        import torch

        self.device = torch.device("cuda", 0)

    def record_event(self, event: Any = None) -> Any:
        return event or _Event()

    def is_capturing(self) -> bool:
        return False

    def __enter__(self) -> _Stream:
        return self

    def _do_nothing(self, *_arguments: Any) -> None:
        pass

    wait_stream = wait_event = synchronize = __exit__ = _do_nothing


def pretend_one_gpu(memory: int) -> None:
    """Let torch.cuda describe one device of this memory in bytes, with one stream that has nothing to do."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    stream = _Stream()
    properties = SimpleNamespace(
        name="simulated GPU", major=9, minor=0, total_memory=memory, multi_processor_count=132, warp_size=32
    )
    # one function each: torch rejects a function with two names at import
    functions = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda _device: None,
        "_get_device_index": lambda *_arguments, **_options: 0,
        "_exchange_device": lambda _device: 0,
        "_maybe_exchange_device": lambda _device: 0,
        "synchronize": lambda *_device: None,
        "current_stream": lambda *_device: stream,
        "default_stream": lambda *_device: stream,
        "set_stream": lambda _stream: None,
        "stream": lambda _stream=None: contextlib.nullcontext(),
        "Stream": _Stream,
        "Event": _Event,
        "get_device_properties": lambda *_device: properties,
        "get_device_capability": lambda *_device: (properties.major, properties.minor),
        "get_device_name": lambda *_device: properties.name,
        "is_bf16_supported": lambda *_arguments, **_options: True,
        "mem_get_info": lambda *_device: (memory, memory),
        "manual_seed": lambda _seed: None,
        "manual_seed_all": lambda _seed: None,
        "get_rng_state": lambda *_device: torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda *_arguments: None,
    }
    for name, function in functions.items():
        setattr(torch.cuda, name, function)
    # bitsandbytes reads it when it is imported; a build of torch without CUDA has none
    torch._C._cuda_getCurrentRawStream = lambda device: 0
    torch.accelerator.current_stream = lambda *_device: stream  # type: ignore[assignment]
    torch.accelerator.set_stream = lambda _stream: None  # type: ignore[assignment]
    torch.Tensor.record_stream = lambda _tensor, _stream: None  # type: ignore[assignment,method-assign]
    torch.Tensor.pin_memory = _pretend_pinned  # type: ignore[assignment,method-assign]
    # one kernel on GPUs; without it torch would compute the gradient in seven operations, each with an output
    if not torch._C._dispatch_has_kernel_for_dispatch_key("aten::silu_backward", "CUDA"):
        _KERNELS.append(library := torch.library.Library("aten", "IMPL"))
        library.impl("silu_backward", lambda _grad, inputs: torch.empty_like(inputs), "CUDA")
    # a fake tensor must not start CUDA, which a machine without a GPU cannot
    FakeTensorMode.avoid_device_init = property(lambda _mode: True)  # type: ignore[assignment]


def _pretend_pinned(tensor: Any, *_device: Any) -> Any:
    pinned = tensor.detach()
    pinned.is_page_locked = True  # for `HostSide`
    return pinned
