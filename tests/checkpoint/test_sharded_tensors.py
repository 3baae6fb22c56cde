"""Parts of tensors in many files: any box comes back bit for bit, and what is lost or does not fit is named."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from thresher.checkpoint.safetensors_io import save_parts
from thresher.checkpoint.sharded import HostBuffers, ShardFile, TensorShard
from thresher.checkpoint.sharded_reader import ShardedReader, load_tensors
from thresher.errors import CheckpointError


def write_grid(directory: Path, tensor: Tensor, rows: list[int], columns: list[int]) -> None:
    """Cut a matrix at rows and columns, one piece a file; beside it a number that the first file alone has."""
    row_ends, column_ends = [0, *rows, tensor.shape[0]], [0, *columns, tensor.shape[1]]
    pieces = [
        TensorShard(tensor[top:bottom, left:right], tuple(tensor.shape), (top, left))
        for top, bottom in pairwise(row_ends)
        for left, right in pairwise(column_ends)
    ]
    for index, piece in enumerate(pieces):
        own = {"grid": piece} if piece.values.numel() else {}
        own |= {"count": TensorShard(torch.tensor(7.0), (), ())} if index == 0 else {}
        save_parts(directory, "x", own, ShardFile(index, len(pieces)))


@given(data=st.data())
def test_any_box_of_any_grid_comes_back(tmp_path_factory, data):
    shape = data.draw(st.tuples(st.integers(1, 7), st.integers(1, 7)))
    tensor = torch.arange(shape[0] * shape[1], dtype=torch.float32).reshape(shape)
    cuts = [sorted(data.draw(st.lists(st.integers(0, size), max_size=3))) for size in shape]
    directory = tmp_path_factory.mktemp("grid")
    write_grid(directory, tensor, *cuts)
    box = tuple(slice(*sorted(data.draw(st.tuples(st.integers(0, size), st.integers(0, size))))) for size in shape)
    with ShardedReader(directory, "x") as stored:
        assert torch.equal(stored.read("grid", box), tensor[box])
        assert stored.read("count").item() == 7.0
        assert stored.kinds() == {"grid": (shape, torch.float32), "count": ((), torch.float32)}
    assert torch.equal(load_tensors(directory, "x")["grid"], tensor)


def test_a_file_without_its_part_is_no_smaller_tensor(tmp_path):
    write_grid(tmp_path, torch.ones(4, 4), [2], [])
    save_parts(tmp_path, "x", {}, ShardFile(1, 2))
    with pytest.raises(CheckpointError, match="lacks parts of grid; resume from another checkpoint"):
        load_tensors(tmp_path, "x")


@pytest.mark.parametrize(
    "header",
    [
        {"parts": {"grid": [[4, 4], [3, 0]]}},
        {"parts": {"grid": [[4, 4], [-1, 0]]}},
        {"parts": {"grid": [[4], [0]]}},
        {"parts": {"grid": "here"}},
        ["parts"],
    ],
    ids=["outside", "before", "other dims", "text", "list"],
)
def test_a_header_that_says_nonsense_is_refused(tmp_path, header):
    save_file({"grid": torch.ones(2, 4)}, tmp_path / "x.safetensors", metadata={"thresher": json.dumps(header)})
    with pytest.raises(CheckpointError, match=r"x\.safetensors .*resume from another checkpoint"):
        load_tensors(tmp_path, "x")


def test_parts_of_two_dtypes_are_not_put_together(tmp_path):
    save_parts(tmp_path, "x", {"a": TensorShard(torch.ones(2), (4,), (0,))}, ShardFile(0, 2))
    save_parts(tmp_path, "x", {"a": TensorShard(torch.ones(2).bfloat16(), (4,), (2,))}, ShardFile(1, 2))
    with pytest.raises(CheckpointError, match="has a part of a that fits no other"):
        load_tensors(tmp_path, "x")


def test_a_copy_stays_when_the_tensor_moves_on_and_its_memory_serves_the_next(tmp_path):
    copies, weight = HostBuffers(), torch.arange(4.0)
    first = copies.take("w", weight)
    weight += 1
    assert first.tolist() == [0, 1, 2, 3]
    second = copies.take("w", weight)
    assert second.tolist() == [1, 2, 3, 4]
    assert second.data_ptr() == first.data_ptr()
    assert copies.take("w", torch.ones(2, dtype=torch.float64)).tolist() == [1, 1]
