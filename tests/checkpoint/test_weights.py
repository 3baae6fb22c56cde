"""A checkpoint's weights are loaded bit for bit, and only into a model with the same parameters."""

from __future__ import annotations

import pytest
import torch

from thresher.checkpoint.state import STEM, load_weights
from thresher.checkpoint.tensor_files import save_tensors
from thresher.errors import CheckpointError


def parameters(**changes: torch.Tensor | None) -> dict[str, torch.Tensor]:
    values = {"a": torch.zeros(2, 3), "b": torch.zeros(4)} | changes
    return {name: torch.nn.Parameter(value) for name, value in values.items() if value is not None}


def test_weights_are_loaded_bitwise(tmp_path):
    stored = {"a": torch.randn(2, 3), "b": torch.tensor([float("nan"), -0.0, float("inf"), 1e-45])}
    save_tensors(tmp_path, STEM, stored)
    loaded = parameters()
    load_weights(tmp_path, loaded, hint="unused")
    for name, tensor in stored.items():
        assert torch.equal(loaded[name].detach().view(torch.int32), tensor.view(torch.int32))


@pytest.mark.parametrize(
    "changes",
    [
        {"b": None},
        {"c": torch.zeros(1)},
        {"b": torch.zeros(5)},
        {"b": torch.zeros(1)},  # a copy would broadcast
        {"b": torch.zeros(4, dtype=torch.bfloat16)},
    ],
    ids=["one less", "one more", "longer", "broadcast", "rounded"],
)
def test_another_name_shape_or_dtype_is_rejected_and_nothing_is_copied(tmp_path, changes):
    save_tensors(tmp_path, STEM, {"a": torch.ones(2, 3), "b": torch.ones(4)})
    loaded = parameters(**changes)
    with pytest.raises(CheckpointError, match=r"was made for another model: 1 weights differ, such as [bc]; do this$"):
        load_weights(tmp_path, loaded, hint="do this")
    assert not any(parameter.any() for parameter in loaded.values())
