"""Peak memory of this process and its CUDA devices, in units of 10^9 bytes."""

import resource
import sys
from pathlib import Path

import torch


def memory_metrics() -> dict[str, float]:
    """Return the peaks since the process started; the CUDA peaks are the maximum over its devices."""
    metrics = {"memory/peak_rss_gb": peak_rss_bytes() / 1e9}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        devices = range(torch.cuda.device_count())
        metrics["memory/peak_cuda_allocated_gb"] = max(map(torch.cuda.max_memory_allocated, devices)) / 1e9
        metrics["memory/peak_cuda_reserved_gb"] = max(map(torch.cuda.max_memory_reserved, devices)) / 1e9
    return metrics


def peak_rss_bytes() -> int:
    """Return the peak resident set of this process."""
    # On Linux a new process inherits ru_maxrss from its parent; VmHWM covers this process alone.
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
