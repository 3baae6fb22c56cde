"""A checkpoint's weights go into the model they were made for, bit for bit, and into no other."""

from __future__ import annotations

import pytest
import torch

from thresher.checkpoint.safetensors_io import save_tensors
from thresher.checkpoint.weights import STEM, load_weights
from thresher.errors import CheckpointError


def parameters(**changes: torch.Tensor | None) -> dict[str, torch.Tensor]:
    values = {"a": torch.zeros(2, 3), "b": torch.zeros(4)} | changes
    return {name: torch.nn.Parameter(value) for name, value in values.items() if value is not None}


def test_every_bit_arrives(tmp_path):
    stored = {"a": torch.randn(2, 3), "b": torch.tensor([float("nan"), -0.0, float("inf"), 1e-45])}
    save_tensors(tmp_path, STEM, stored)
    own = parameters()
    load_weights(tmp_path, own, mend="unused")
    for name, tensor in stored.items():
        assert torch.equal(own[name].detach().view(torch.int32), tensor.view(torch.int32))


@pytest.mark.parametrize(
    "changes",
    [
        {"b": None},
        {"c": torch.zeros(1)},
        {"b": torch.zeros(5)},
        {"b": torch.zeros(1)},  # a copy would spread or lose values
        {"b": torch.zeros(4, dtype=torch.bfloat16)},
    ],
    ids=["one less", "one more", "longer", "broadcast", "rounded"],
)
def test_another_name_shape_or_dtype_is_refused_and_nothing_is_copied(tmp_path, changes):
    save_tensors(tmp_path, STEM, {"a": torch.ones(2, 3), "b": torch.ones(4)})
    own = parameters(**changes)
    with pytest.raises(CheckpointError, match=r"was made for another model: 1 weights differ, such as [bc]; do this$"):
        load_weights(tmp_path, own, mend="do this")
    assert not any(parameter.any() for parameter in own.values())
