"""Weights of a checkpoint into the parameters of a model: all of them, each of its own shape and dtype, or none."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from thresher.checkpoint.tensors import load_tensors
from thresher.errors import CheckpointError

STEM = "weights"


@torch.no_grad()
def load_weights(directory: Path, parameters: Mapping[str, Tensor], *, mend: str) -> None:
    """Copy a checkpoint's weights, bitwise; `mend` tells a person what to do where they belong to another model."""
    stored = load_tensors(directory, STEM)
    expected = {name: (parameter.shape, parameter.dtype) for name, parameter in parameters.items()}
    found = {name: (tensor.shape, tensor.dtype) for name, tensor in stored.items()}
    odd = sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name))
    if odd:
        raise CheckpointError(
            f"the checkpoint in {directory} was made for another model: {len(odd)} weights differ, such as {odd[0]}; "
            f"{mend}"
        )
    for name, parameter in parameters.items():
        parameter.copy_(stored[name])
