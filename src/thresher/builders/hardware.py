"""GPUs as the driver reports them, their rates by data sheet, and the share of them that a step reaches."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch

from thresher.errors import UserError

Compiled = Literal["nothing", "functions", "layers"]
# Shares of the peak at which a step computes, by what is compiled: the FLOPs of its products over all that a GPU does
# between messages. From steps of Llama 3.1 on H100 GPUs that torchtitan has published. Not compiled, 0.335 fits both.
# Compiled, 0.39 fits 8B on 8 GPUs and 0.375 all six in least squares; 0.38 predicts each of the six within 15 %.
# "functions", norms and activations alone, is taken to be in between.
# tests/plan/test_published_steps.py has the steps.
COMPUTE_RATES: Mapping[Compiled, float] = {"layers": 0.38, "functions": 0.36, "nothing": 0.335}
# of links and of device memory, assumed
LINK_RATE = MEMORY_RATE = 0.8
GIGA = 1e9
# of a GPU's memory, by its context and the desktop; more belongs to other processes
_SHARE_IN_USE = 0.05


@dataclass(frozen=True)
class Hardware:
    """One GPU and its links."""

    name: str
    peak_flops: float  # dense bf16 per second, or fp16
    memory: float  # bytes
    memory_bandwidth: float  # bytes per second, as all others
    intra_node: float  # per GPU and direction
    inter_node: float
    has_bf16: bool = True

    def with_rates(
        self, *, peak_flops: float | None = None, memory: float | None = None, bandwidth: float | None = None
    ) -> Hardware:
        """Replace rates: TFLOP/s, GB, and GB/s per GPU between nodes."""
        return replace(
            self,
            peak_flops=self.peak_flops if peak_flops is None else peak_flops * 1e12,
            memory=self.memory if memory is None else memory * GIGA,
            inter_node=self.inter_node if bandwidth is None else bandwidth * GIGA,
        )

    def link(self, extent: int, gpus_per_node: int) -> float:
        """Bytes per second of a group: of the slower link if its `extent` adjacent processes span nodes."""
        return LINK_RATE * (self.intra_node if extent <= gpus_per_node else self.inter_node)


# TFLOP/s with fp32 sums, GB, GB/s of memory, GB/s per direction within a node (NVLink, Infinity Fabric, or PCIe with 16
# lanes) and between nodes (100, 200 or 400 Gbit/s). Data sheets give twice these TFLOP/s "with sparsity", and for
# GeForce cards twice these with fp16 sums.
_DATA_SHEETS = {
    "t4": (65, 16, 320, 16, 12.5),
    "v100": (125, 32, 900, 150, 12.5),
    "rtx-3090": (71, 24, 936, 32, 12.5),
    "rtx-4090": (165.2, 24, 1008, 32, 12.5),
    "rtx-5090": (209.5, 32, 1792, 64, 12.5),
    "rtx-a6000": (154.8, 48, 768, 32, 12.5),
    "a10": (125, 24, 600, 32, 12.5),
    "a10g": (70, 24, 600, 32, 12.5),
    "a40": (149.7, 48, 696, 32, 25),
    "a100": (312, 80, 2039, 300, 25),
    "a100-40gb": (312, 40, 1555, 300, 25),
    "l4": (121, 24, 300, 32, 12.5),
    "l40s": (362, 48, 864, 32, 25),
    "h20": (148, 96, 4000, 450, 50),
    "h100": (989, 80, 3350, 450, 50),
    "h100-pcie": (756, 80, 2000, 64, 50),
    "h200": (989, 141, 4800, 450, 50),
    "gh200": (989, 96, 4000, 450, 50),
    "b200": (2250, 180, 8000, 900, 50),
    "gb200": (2500, 186, 8000, 900, 50),
    "mi300x": (1307, 192, 5300, 448, 50),
}
_WITHOUT_BF16 = ("t4", "v100")


def _gpu(name: str, teraflops: float, *rates: float) -> Hardware:
    memory, memory_bandwidth, intra, inter = (GIGA * rate for rate in rates)
    return Hardware(name, teraflops * 1e12, memory, memory_bandwidth, intra, inter, name not in _WITHOUT_BF16)


GPUS = {name: _gpu(name, *rates) for name, rates in _DATA_SHEETS.items()}
DEFAULT_GPU = "h100"
_VENDORS = ("nvidia", "geforce", "tesla", "amd", "instinct")


def find_gpu(name: str) -> Hardware:
    """The GPU of a name as people write it: `NVIDIA GeForce RTX 4090`, `rtx4090` or `4090`."""
    written = "".join(word for word in _words(name) if word not in _VENDORS)
    for gpu in GPUS.values():
        words = "".join(_words(gpu.name))
        if written in (words, words.removeprefix("rtx")):
            return gpu
    raise UserError(
        f"--gpu {name} is not known; use one of {', '.join(GPUS)}, or also pass --peak-flops, --memory and --bandwidth"
    )


def _words(name: str) -> list[str]:
    return re.findall("[a-z0-9]+", name.lower())


def reported_gpu(name: str, memory: int) -> Hardware:
    """The GPU that a driver reports by this name, with the default one's rates if it is not known."""
    words = set(_words(name))
    matching = [known for known in GPUS if words.issuperset(_words(known))]
    return replace(GPUS[max(matching, key=len, default=DEFAULT_GPU)], name=name, memory=memory)


def gpu_of(device: torch.device) -> Hardware | None:
    """Ask the driver for a GPU's memory: all of it, unless other processes use some. None for a CPU."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    # the total where possible: it is the same in every run, so equal runs choose equal budgets
    return reported_gpu(torch.cuda.get_device_name(device), total if total - free <= _SHARE_IN_USE * total else free)
