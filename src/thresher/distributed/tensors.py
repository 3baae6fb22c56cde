"""Tensors between the host and devices, and local shards of tensors that may be DTensors.

The host waits for copies as rarely as possible.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def local_slices(tensor: Tensor) -> tuple[slice, ...]:
    """Return the slices of the full tensor that this process holds."""
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, size) for size in tensor.shape)
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(first, first + size) for first, size in zip(offset, shape, strict=True))


def to_local(tensor: Tensor) -> Tensor:
    """Return the local shard; a plain tensor is returned unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def own_part(tensor: Tensor, mesh: DeviceMesh, dim: int) -> Tensor:
    """Return this process's part of a tensor that all processes of a mesh have; the backward gathers."""
    whole = DTensor.from_local(tensor, mesh, (Replicate(),), run_check=False)
    own: Tensor = whole.redistribute(placements=(Shard(dim),)).to_local()
    return own


def copy_to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to a device. To a GPU from pinned memory: the host does not wait for the copy."""
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def stack_numbers(numbers: Sequence[Tensor | float], device: torch.device) -> Tensor:
    """Put scalars into one fp64 vector on a device; the host does not wait."""
    on = torch.device("cpu") if device.type == "mps" else device  # MPS has no fp64
    on_device = {at: n for at, n in enumerate(numbers) if isinstance(n, Tensor) and n.device.type != "cpu"}
    known = [0.0 if at in on_device else float(number) for at, number in enumerate(numbers)]
    vector = copy_to_device(torch.tensor(known, dtype=torch.float64), on)
    if not on_device:
        return vector
    return torch.stack(
        [on_device[at].detach().to(on, torch.float64) if at in on_device else vector[at] for at in range(len(known))]
    )


def copy_arrays_to_device(arrays: Sequence[npt.NDArray[np.int64]], device: torch.device) -> list[Tensor]:
    """Copy integer arrays to a device as int32 tensors with separate memory, in one copy."""
    packed = torch.from_numpy(np.concatenate([array.ravel() for array in arrays]).astype(np.int32))
    copies = [torch.empty(array.shape, dtype=torch.int32, device=device) for array in arrays]
    # not views of one tensor: compiled code would depend on their offsets
    torch.split_with_sizes_copy(
        copy_to_device(packed, device), [array.size for array in arrays], out=[copy.view(-1) for copy in copies]
    )
    return copies


def read_numbers(numbers: Sequence[Tensor | float]) -> list[float]:
    """Read scalars, of which some may be on a device: one wait, not one per scalar."""
    devices = [number.device for number in numbers if isinstance(number, Tensor)]
    device = next((each for each in devices if each.type != "cpu"), torch.device("cpu"))
    read: list[float] = stack_numbers(numbers, device).cpu().tolist()
    return read
