"""GPUs: as the driver reports them, and by name with the rates of the vendors' data sheets, for estimates."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from thresher.errors import UserError

GIGA = 1e9
# of a GPU's memory, by its context and the desktop; more belongs to other processes
_SHARE_IN_USE = 0.05


@dataclass(frozen=True)
class Hardware:
    """One GPU and its links. peak_flops: dense bf16 FLOP per second; all others in bytes or bytes per second.

    intra_node, inter_node: bandwidth per GPU and direction, within a node and between nodes.
    """

    name: str
    peak_flops: float
    memory: float
    memory_bandwidth: float
    intra_node: float
    inter_node: float

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


def _gpu(name: str, teraflops: float, memory: float, memory_bandwidth: float, intra: float, inter: float) -> Hardware:
    return Hardware(name, teraflops * 1e12, *(number * GIGA for number in (memory, memory_bandwidth, intra, inter)))


# TFLOP/s, GB, GB/s of memory, GB/s per direction within a node (NVLink or PCIe) and between nodes (200 or 400 Gbit/s)
GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu("a100", 312, 80, 2039, 300, 25),
        _gpu("a100-40gb", 312, 40, 1555, 300, 25),
        _gpu("l40s", 362, 48, 864, 32, 25),
        _gpu("h100", 989, 80, 3350, 450, 50),
        _gpu("h200", 989, 141, 4800, 450, 50),
        _gpu("b200", 2250, 180, 8000, 900, 50),
    )
}
DEFAULT_GPU = "h100"


def find_gpu(name: str) -> Hardware:
    try:
        return GPUS[name.lower()]
    except KeyError:
        raise UserError(
            f"--gpu {name} is not known; use one of {', '.join(GPUS)}, or also pass --peak-flops, --memory and "
            "--bandwidth"
        ) from None


@dataclass(frozen=True)
class Gpu:
    """A GPU as its driver reports it. memory: bytes that a run can use."""

    name: str
    memory: int

    @property
    def hardware(self) -> Hardware:
        """Rates of the GPU of this name, or of the default one if it is not known, with this memory."""
        words = {name: name.split("-") for name in GPUS}
        matching = [name for name, parts in words.items() if all(part in self.name.lower() for part in parts)]
        found = GPUS[max(matching, key=len, default=DEFAULT_GPU)]
        return replace(found, name=self.name, memory=self.memory)


def gpu_of(device: torch.device) -> Gpu | None:
    """Ask the driver for a GPU's memory: all of it, unless other processes use some. None for a CPU."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    # the total where possible: it is the same in every run, so that equal runs choose equal budgets
    return Gpu(torch.cuda.get_device_name(device), total if total - free <= _SHARE_IN_USE * total else free)
