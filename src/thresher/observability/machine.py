"""The machine of this process: versions, hardware and peak memory. No host name, user or path."""

from __future__ import annotations

import os
import platform
import resource
import sys
from importlib import metadata
from pathlib import Path

import psutil
import torch

_PACKAGES = ("thresher", "torch", "transformers", "peft", "ray", "datasets", "deepspeed", "megatron-core")


def environment() -> dict[str, str]:
    """Return facts by name, in the order to show them."""
    facts = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            facts[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    facts["system"] = platform.platform(terse=True)
    facts["processor"] = f"{processor()}, {os.cpu_count()} logical cores"
    facts["memory"] = f"{psutil.virtual_memory().total / 1e9:.1f} GB"
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(device) for device in range(torch.cuda.device_count())]
        facts["GPUs"] = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
        facts["CUDA"] = str(torch.version.cuda)
    return facts


def processor() -> str:
    return _proc_value("cpuinfo", "model name") or platform.processor() or platform.machine()


def _proc_value(file: str, name: str) -> str | None:
    """Return the first value of this name in a file of /proc; None on systems without it."""
    path = Path("/proc") / file
    lines = path.read_text().splitlines() if path.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), None)


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
    if (high_water_mark := _proc_value("self/status", "VmHWM:")) is not None:
        return int(high_water_mark.split()[0]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
