"""Compile FlexAttention for a GPU on a machine without one: `python -m tests.support.compile_for_gpu CAPABILITY GUARD`.

Tensors on the device have no values, as in a simulated rank; Inductor generates the kernels, and Triton and ptxas
compile them. Nothing is launched. Prints the kernels as JSON.

CAPABILITY: 80, 90 or 100. GUARD: the compiled device guard, or an empty string with a CUDA build of torch.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from thresher.plan.simulate.fake_cuda import load_guard, pretend_one_gpu

# shared memory per block in bytes, and multiprocessors, of an A100, H100 and B200
GPUS = {80: (166_912, 108), 90: (232_448, 132), 100: (232_448, 148)}


def main(capability: int, guard: str) -> None:
    if guard:
        load_guard(Path(guard))
    pretend_one_gpu(80 * 2**30)
    _pretend_capability(capability)
    kernels = _record_compiled_kernels()
    _compile_attention()
    print(json.dumps(kernels))


def _pretend_capability(capability: int) -> None:
    """Let torch and Triton see a GPU that can be compiled for, not run on."""
    import torch
    from triton.backends.compiler import GPUTarget
    from triton.backends.driver import DriverBase
    from triton.runtime import driver

    shared_memory, processors = GPUS[capability]
    properties = SimpleNamespace(
        name="simulated GPU",
        major=capability // 10,
        minor=capability % 10,
        total_memory=80 * 2**30,
        multi_processor_count=processors,
        warp_size=32,
        regs_per_multiprocessor=65_536,
        max_threads_per_multi_processor=2_048,
        max_threads_per_block=1_024,
        shared_memory_per_block_optin=shared_memory,
        gcnArchName="",
    )
    torch.cuda.get_device_properties = lambda *_device: properties  # type: ignore[assignment]
    torch.cuda.get_device_capability = lambda *_device: (properties.major, properties.minor)
    torch._C._cuda_getCurrentRawStream = lambda _device: 0  # type: ignore[attr-defined]
    torch._C._dynamo.guards._empty_strided_cuda = lambda size, stride, dtype: torch.empty_strided(
        size, stride, dtype=dtype, device="cuda"
    )

    class Driver(DriverBase):  # type: ignore[misc]
        """A driver that names the target."""

        utils = SimpleNamespace(
            get_device_properties=lambda _device: {
                "max_shared_mem": shared_memory,
                "multiprocessor_count": processors,
                "max_num_regs": 65_536,
                "warpSize": 32,
            }
        )

        def __init__(self) -> None:
            pass

        @classmethod
        def is_active(cls) -> bool:
            return True

        def get_current_target(self) -> Any:
            return GPUTarget("cuda", capability, 32)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, _device: int | None = None) -> int:
            return 0

        def get_active_torch_device(self) -> torch.device:
            return torch.device("cuda", 0)

        def get_benchmarker(self) -> Any:
            raise RuntimeError("there is no GPU to measure on")

        def map_python_to_cpp_type(self, name: str) -> str:
            return name

    driver.set_active(Driver())
    from torch._inductor.runtime import triton_helpers  # after all above, which it reads when it is imported

    triton_helpers.set_driver_to_gpu = lambda: None


def _record_compiled_kernels() -> list[dict[str, object]]:
    """Let Inductor compile kernels in this process and not launch them; return the list of those it compiles."""
    import torch._inductor.config as inductor
    import triton
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    inductor.compile_threads = 1
    inductor.force_disable_caches = True
    compile_kernel, kernels = triton.compile, []

    def compile_and_record(*arguments: Any, **settings: Any) -> Any:
        compiled = compile_kernel(*arguments, **settings)
        metadata = compiled.metadata
        kernels.append(
            {
                "name": metadata.name,
                "capability": metadata.target.arch,
                "cubin_bytes": len(compiled.asm["cubin"]),
                "ptx_target": next(
                    line.split()[1] for line in compiled.asm["ptx"].splitlines() if line.startswith(".target")
                ),
                "shared_memory": metadata.shared,
            }
        )
        return compiled

    triton.compile = compile_and_record
    CachingAutotuner.precompile = lambda tuner, *_arguments, **_settings: tuner._precompile_worker()
    CachingAutotuner.run = lambda *_arguments, **_settings: None
    return kernels


def _compile_attention() -> None:
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from thresher.models.attention.flex import block_mask, compiled_flex_attention, flex_segment_attention
    from thresher.models.attention.segments import Segment

    segments = (Segment(0, 639), Segment(639, 1022, 0, 256), Segment(1022, 1500))
    device = torch.device("cuda", 0)
    for head_dim, dtype, with_grad, softcap in (
        (128, torch.bfloat16, True, None),
        (64, torch.bfloat16, True, None),
        (256, torch.bfloat16, True, None),
        (128, torch.bfloat16, True, 30.0),
        (128, torch.float32, False, None),  # the start-up check
        (256, torch.float32, False, None),
    ):
        with FakeTensorMode(allow_non_fake_inputs=True), torch.set_grad_enabled(with_grad):
            shapes = [(1, heads, 1500, head_dim) for heads in (32, 4, 4)]  # 8 heads per head of keys
            heads = [torch.empty(shape, device=device, dtype=dtype, requires_grad=with_grad) for shape in shapes]
            mask = block_mask(segments, 1500, None, device)
            out = flex_segment_attention(*heads, mask, head_dim**-0.5, softcap, compiled_flex_attention())
            if with_grad:
                out.sum().backward()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
