"""Copies between the host and a device, at which the host waits as rarely as possible."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thresher.losses.pairs import to_fp64


def copy_to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to a device. To a GPU from pinned memory, so that the host does not wait for the copy."""
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def read_numbers(numbers: Sequence[Tensor | float]) -> list[float]:
    """Read scalars, of which some are on a device: one wait for each device, not one per scalar."""
    found = [float("nan") if isinstance(number, Tensor) else float(number) for number in numbers]
    tensors = [(at, number.detach()) for at, number in enumerate(numbers) if isinstance(number, Tensor)]
    for device in {tensor.device for _, tensor in tensors}:
        on_device = [(at, tensor) for at, tensor in tensors if tensor.device == device]
        values = torch.stack([to_fp64(tensor) for _, tensor in on_device]).cpu().tolist()
        for (at, _), value in zip(on_device, values, strict=True):
            found[at] = value
    return found
