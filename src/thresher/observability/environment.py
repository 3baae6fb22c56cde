"""Versions and hardware of this process, to reproduce and compare runs. No host name, user or path."""

from __future__ import annotations

import os
import platform
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
    facts["processor"] = f"{_processor()}, {os.cpu_count()} logical cores"
    facts["memory"] = f"{psutil.virtual_memory().total / 1e9:.1f} GB"
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(device) for device in range(torch.cuda.device_count())]
        facts["GPUs"] = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
        facts["CUDA"] = str(torch.version.cuda)
    return facts


def _processor() -> str:
    models = Path("/proc/cpuinfo")
    if models.exists():
        for line in models.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
