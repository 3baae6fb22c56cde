"""GPUs: as the driver reports them, and by name with the rates of the vendors' data sheets, for estimates."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import torch

from thresher.errors import UserError

GIGA = 1e9
# of a GPU's memory, by its context and the desktop; more belongs to other processes
_SHARE_IN_USE = 0.05


@dataclass(frozen=True)
class Hardware:
    """One GPU and its links. peak_flops: dense bf16 FLOP per second; all others in bytes or bytes per second.

    intra_node, inter_node: bandwidth per GPU and direction, within a node and between nodes. has_bf16: if not,
    peak_flops is the rate of fp16.
    """

    name: str
    peak_flops: float
    memory: float
    memory_bandwidth: float
    intra_node: float
    inter_node: float
    has_bf16: bool = True

    def with_rates(
        self, *, peak_flops: float | None = None, memory: float | None = None, bandwidth: float | None = None
    ) -> Hardware:
        """Replace rates: TFLOP/s, GB, and GB/s per GPU between nodes."""
        changes: dict[str, float] = {}
        if peak_flops is not None:
            changes["peak_flops"] = peak_flops * 1e12
        if memory is not None:
            changes["memory"] = memory * GIGA
        if bandwidth is not None:
            changes["inter_node"] = bandwidth * GIGA
        return replace(self, **changes) if changes else self  # type: ignore[arg-type]


def _gpu(
    name: str,
    teraflops: float,
    memory: float,
    memory_bandwidth: float,
    intra: float,
    inter: float,
    *,
    has_bf16: bool = True,
) -> Hardware:
    return Hardware(
        name, teraflops * 1e12, memory * GIGA, memory_bandwidth * GIGA, intra * GIGA, inter * GIGA, has_bf16
    )


# TFLOP/s with fp32 sums, GB, GB/s of memory, GB/s per direction within a node (NVLink, Infinity Fabric, or PCIe with 16
# lanes) and between nodes (100, 200 or 400 Gbit/s). Data sheets give twice these TFLOP/s "with sparsity", and those of
# GeForce cards twice these with fp16 sums.
GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu("t4", 65, 16, 320, 16, 12.5, has_bf16=False),
        _gpu("v100", 125, 32, 900, 150, 12.5, has_bf16=False),
        _gpu("rtx-3090", 71, 24, 936, 32, 12.5),
        _gpu("rtx-4090", 165.2, 24, 1008, 32, 12.5),
        _gpu("rtx-5090", 209.5, 32, 1792, 64, 12.5),
        _gpu("rtx-a6000", 154.8, 48, 768, 32, 12.5),
        _gpu("a10", 125, 24, 600, 32, 12.5),
        _gpu("a10g", 70, 24, 600, 32, 12.5),
        _gpu("a40", 149.7, 48, 696, 32, 25),
        _gpu("a100", 312, 80, 2039, 300, 25),
        _gpu("a100-40gb", 312, 40, 1555, 300, 25),
        _gpu("l4", 121, 24, 300, 32, 12.5),
        _gpu("l40s", 362, 48, 864, 32, 25),
        _gpu("h20", 148, 96, 4000, 450, 50),
        _gpu("h100", 989, 80, 3350, 450, 50),
        _gpu("h100-pcie", 756, 80, 2000, 64, 50),
        _gpu("h200", 989, 141, 4800, 450, 50),
        _gpu("gh200", 989, 96, 4000, 450, 50),
        _gpu("b200", 2250, 180, 8000, 900, 50),
        _gpu("gb200", 2500, 186, 8000, 900, 50),
        _gpu("mi300x", 1307, 192, 5300, 448, 50),
    )
}
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


@dataclass(frozen=True)
class Gpu:
    """A GPU as its driver reports it. memory: bytes that a run can use."""

    name: str
    memory: int

    @property
    def hardware(self) -> Hardware:
        """Rates of the GPU of this name, or of the default one if it is not known, with this memory."""
        words = set(_words(self.name))
        matching = [name for name in GPUS if words.issuperset(_words(name))]
        found = GPUS[max(matching, key=len, default=DEFAULT_GPU)]
        return replace(found, name=self.name, memory=self.memory)


def gpu_of(device: torch.device) -> Gpu | None:
    """Ask the driver for a GPU's memory: all of it, unless other processes use some. None for a CPU."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    # the total where possible: it is the same in every run, so that equal runs choose equal budgets
    return Gpu(torch.cuda.get_device_name(device), total if total - free <= _SHARE_IN_USE * total else free)
