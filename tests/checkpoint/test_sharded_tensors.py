"""Sharded tensors in many files: any slice is read bit for bit, and missing or mismatched shards are reported."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise
from math import prod
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from thresher.checkpoint import tensor_index
from thresher.checkpoint.background import HostBuffers
from thresher.checkpoint.tensor_files import (
    FlatShard,
    ShardedReader,
    TensorShard,
    load_tensors,
    pack_headers,
    save_indexes,
    save_shards,
)
from thresher.checkpoint.tensor_index import ShardFile, flat_blocks
from thresher.errors import CheckpointError


def write_grid(
    directory: Path, tensor: Tensor, rows: list[int], columns: list[int], *, is_indexed: bool = False
) -> None:
    """Split a matrix at rows and columns, one shard per file; the first file also has a scalar."""
    row_ends, column_ends = [0, *rows, tensor.shape[0]], [0, *columns, tensor.shape[1]]
    shards = [
        TensorShard(tensor[top:bottom, left:right], tuple(tensor.shape), (top, left))
        for top, bottom in pairwise(row_ends)
        for left, right in pairwise(column_ends)
    ]
    for index, shard in enumerate(shards):
        local = {"grid": shard} if shard.values.numel() else {}
        local |= {"count": TensorShard(torch.tensor(7.0), (), ())} if index == 0 else {}
        save_shards(directory, "x", local, ShardFile(index, len(shards)))
    if is_indexed:
        save_index(directory)


def save_index(directory: Path) -> None:
    save_indexes(directory, [pack_headers(directory, [path.name]) for path in sorted(directory.iterdir())])


@given(data=st.data())
def test_any_slice_of_any_sharding_is_read_back(tmp_path_factory, data):
    shape = data.draw(st.tuples(st.integers(1, 7), st.integers(1, 7)))
    tensor = torch.arange(shape[0] * shape[1], dtype=torch.float32).reshape(shape)
    cuts = [sorted(data.draw(st.lists(st.integers(0, size), max_size=3))) for size in shape]
    directory = tmp_path_factory.mktemp("grid")
    write_grid(directory, tensor, *cuts, is_indexed=data.draw(st.booleans()))
    slices = tuple(slice(*sorted(data.draw(st.tuples(st.integers(0, size), st.integers(0, size))))) for size in shape)
    with ShardedReader(directory, "x") as reader:
        assert torch.equal(reader.read("grid", slices), tensor[slices])
        assert reader.read("count").item() == 7.0
        assert reader.specs() == {"grid": (shape, torch.float32), "count": ((), torch.float32)}
    assert torch.equal(load_tensors(directory, "x")["grid"], tensor)


@given(data=st.data())
def test_any_slice_and_any_range_is_read_back_from_flat_shards(tmp_path_factory, data):
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    tensor = torch.arange(prod(shape), dtype=torch.float32).reshape(shape)
    ends = [0, *sorted(data.draw(st.lists(st.integers(0, prod(shape)), max_size=3))), prod(shape)]
    directory = tmp_path_factory.mktemp("flat")
    for index, (start, stop) in enumerate(pairwise(ends)):
        shard = FlatShard(tensor.view(-1)[start:stop], shape, start)
        save_shards(directory, "x", {"w": shard} if stop > start else {}, ShardFile(index, len(ends) - 1))
    if data.draw(st.booleans()):
        save_index(directory)
    slices = tuple(slice(*sorted(data.draw(st.tuples(st.integers(0, size), st.integers(0, size))))) for size in shape)
    start, stop = sorted(data.draw(st.tuples(st.integers(0, prod(shape)), st.integers(0, prod(shape)))))
    with ShardedReader(directory, "x") as reader:
        assert torch.equal(reader.read("w", slices), tensor[slices])
        assert torch.equal(reader.read_flat("w", start, stop), tensor.view(-1)[start:stop])
    assert torch.equal(load_tensors(directory, "x")["w"], tensor)


@given(data=st.data())
def test_the_blocks_of_a_range_have_its_elements_in_order(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    tensor = torch.arange(prod(shape)).reshape(shape)
    start, stop = sorted(data.draw(st.tuples(st.integers(0, prod(shape)), st.integers(0, prod(shape)))))
    blocks = [
        tensor[tuple(slice(first, first + size) for first, size in zip(offset, sizes, strict=True))].flatten().tolist()
        for offset, sizes in flat_blocks(shape, start, stop)
    ]
    assert [number for block in blocks for number in block] == list(range(start, stop))
    assert len(blocks) < 2 * len(shape)


def test_a_range_is_read_from_shards_of_blocks(tmp_path):
    tensor = torch.arange(30.0).reshape(5, 6)
    write_grid(tmp_path, tensor, [2], [4])
    with ShardedReader(tmp_path, "x") as reader:
        assert reader.read_flat("grid", 3, 17).tolist() == list(range(3, 17))


def test_a_missing_shard_is_an_error(tmp_path):
    write_grid(tmp_path, torch.ones(4, 4), [2], [])
    save_shards(tmp_path, "x", {}, ShardFile(1, 2))
    with pytest.raises(CheckpointError, match="lacks shards of grid; resume from a different checkpoint"):
        load_tensors(tmp_path, "x")


@pytest.mark.parametrize(
    "header",
    [
        {"parts": {"grid": [[4, 4], [3, 0]]}},
        {"parts": {"grid": [[4, 4], [-1, 0]]}},
        {"parts": {"grid": [[4], [0]]}},
        {"parts": {"grid": "here"}},
        ["parts"],
        {"flat": {"grid": [[4, 4], 0]}},
        {"flat": {"grid": [[4, 4]]}},
    ],
    ids=["outside", "before", "other dims", "text", "list", "flat but 2-D", "flat without start"],
)
def test_an_invalid_header_is_rejected(tmp_path, header):
    save_file({"grid": torch.ones(2, 4)}, tmp_path / "x.safetensors", metadata={"thresher": json.dumps(header)})
    with pytest.raises(CheckpointError, match=r"x\.safetensors .*resume from a different checkpoint"):
        load_tensors(tmp_path, "x")


@pytest.mark.parametrize("start", [-2, 1, 16], ids=["before", "beyond the end", "after"])
def test_a_flat_shard_outside_of_its_tensor_is_rejected(tmp_path, start):
    """Its 16 elements are as many as the matrix has, so the count alone does not show that some are absent."""
    header = {"flat": {"grid": [[4, 4], start]}}
    save_file({"grid": torch.ones(16)}, tmp_path / "x.safetensors", metadata={"thresher": json.dumps(header)})
    with pytest.raises(CheckpointError, match="has a shard of grid that does not match the others; resume from"):
        load_tensors(tmp_path, "x")


def test_shards_of_two_dtypes_are_rejected(tmp_path):
    save_shards(tmp_path, "x", {"a": TensorShard(torch.ones(2), (4,), (0,))}, ShardFile(0, 2))
    save_shards(tmp_path, "x", {"a": TensorShard(torch.ones(2).bfloat16(), (4,), (2,))}, ShardFile(1, 2))
    with pytest.raises(CheckpointError, match="has a shard of a that does not match the others"):
        load_tensors(tmp_path, "x")


def write_rows(directory: Path, num_files: int, names: str = "ab") -> None:
    """Write one row of each tensor per file, and the index."""
    for row in range(num_files):
        shards = {name: TensorShard(torch.full((1, 2), float(row)), (num_files, 2), (row, 0)) for name in names}
        save_shards(directory, "x", shards, ShardFile(row, num_files))
    save_index(directory)


@pytest.fixture
def opened(monkeypatch) -> list[str]:
    """The files that are opened."""
    names: list[str] = []
    original = tensor_index.safe_open

    def recorded(path: Path, **options: str) -> object:
        names.append(path.name)
        return original(path, **options)

    monkeypatch.setattr(tensor_index, "safe_open", recorded)
    return names


def test_a_rank_opens_only_the_index_and_the_files_of_its_slices(tmp_path, opened):
    write_rows(tmp_path, 40)
    opened.clear()
    with ShardedReader(tmp_path, "x") as reader:
        for name in reader:
            assert reader.read(name, (slice(7, 9), slice(0, 2))).tolist() == [[7, 7], [8, 8]]
    assert opened == ["x.safetensors.index", *(f"x-{number:05d}-of-00040.safetensors" for number in (8, 9))]


def test_to_read_whole_tensors_each_file_is_opened_once(tmp_path, opened):
    write_rows(tmp_path, 40, names="abcde")
    opened.clear()
    load_tensors(tmp_path, "x")
    assert len(opened) == len(set(opened)) == 41


_READ_WITH_FEW_DESCRIPTORS = """
import resource, sys
from pathlib import Path
from thresher.checkpoint.tensor_files import ShardedReader
resource.setrlimit(resource.RLIMIT_NOFILE, (48, 48))
for is_indexed in (True, False):
    with ShardedReader(Path(sys.argv[1]), "x") as reader:
        assert all(reader.read(name)[:, 0].tolist() == list(range(100)) for name in reader)
    (Path(sys.argv[1]) / "x.safetensors.index").unlink(missing_ok=True)
files = []
try:
    while True:
        files.append(open("/dev/null"))
except OSError:
    pass
try:
    ShardedReader(Path(sys.argv[1]), "x")
except Exception as error:
    files.clear()
    print(type(error).__name__, error)
"""


def test_descriptors_do_not_grow_with_writers_and_their_limit_is_not_called_a_missing_file(tmp_path):
    """A CheckpointError would let the run fall back to an older checkpoint."""
    write_rows(tmp_path, 100)
    command = [sys.executable, "-c", _READ_WITH_FEW_DESCRIPTORS, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert done.stdout.startswith("UserError ")
    assert "cannot be opened (Too many open files); a process may open 48 files: raise `nofile`" in done.stdout


def test_the_index_is_the_same_as_the_headers_and_has_the_same_bytes_each_time(tmp_path):
    write_grid(tmp_path, torch.ones(6, 6), [2, 4], [3], is_indexed=True)
    path = tmp_path / "x.safetensors.index"
    content = path.read_bytes()
    indexed = tensor_index.load_index(tmp_path, "x", lambda name: tensor_index.open_file(tmp_path / name))
    path.unlink()
    of_headers = tensor_index.load_index(tmp_path, "x", lambda name: tensor_index.open_file(tmp_path / name))
    assert (indexed.specs, indexed.num_blocks) == (of_headers.specs, of_headers.num_blocks)
    assert indexed.blocks.tolist() == of_headers.blocks.tolist()
    save_index(tmp_path)
    assert path.read_bytes() == content


def test_a_file_that_cannot_be_read_after_it_was_written_is_not_called_a_damaged_checkpoint(tmp_path):
    with pytest.raises(FileNotFoundError):
        pack_headers(tmp_path, ["x-00001-of-00002.safetensors"])


BLOCKS = [[0, -1, 0, 0, 2, 4], [1, -1, 2, 0, 2, 4]]


@pytest.mark.parametrize(
    ("num_files", "tensors", "blocks", "problem"),
    [
        (2, [["grid", [4, 4], "float32", 2]], [BLOCKS[0], [1, -1, 3, 0, 2, 4]], "has a shard of grid that does not"),
        (2, [["grid", [4, 4], "float32", 2]], [BLOCKS[0], [1, -1, 2, 0, 2, -4]], "has a shard of grid that does not"),
        (2, [["grid", [4, 4], "float32", 2]], [BLOCKS[0], [2, -1, 2, 0, 2, 4]], "has a shard of grid that does not"),
        (2, [["grid", [4, 4], "float32", 1]], BLOCKS[:1], "lacks shards of grid"),
        (2, [["grid", [4, 4], "float32", 1]], BLOCKS, "not a readable safetensors file"),
        (2, [["grid", [4, 4], "load", 2]], BLOCKS, "load is not a dtype"),
        (2, [["grid", [4, 4], "float16", 2]], BLOCKS, "its shard of grid is not the one in the index"),
        (2, [["other", [4, 4], "float32", 2]], BLOCKS, "not a readable safetensors file"),
        (2, [["grid", [2, 8], "float32", 2]], [[0, -1, 0, 0, 2, 4], [1, -1, 0, 4, 2, 4]], None),
        (3, [["grid", [4, 4], "float32", 2]], BLOCKS, "is missing"),
        (None, [["grid", [4, 4], "float32", 2]], BLOCKS, "not a readable safetensors file"),
        (2, [["grid", [4, 4], "float32", 2]], [[0, 4, 0, 0, 2, 4], BLOCKS[1]], "not a readable safetensors file"),
        (2, ["grid"], BLOCKS, "not a readable safetensors file"),
    ],
)
def test_an_index_that_does_not_fit_its_files_is_rejected(tmp_path, num_files, tensors, blocks, problem):
    write_grid(tmp_path, torch.ones(4, 4), [2], [])
    header = {"thresher": json.dumps({"num_files": num_files, "tensors": tensors})}
    save_file({"blocks": torch.tensor(blocks)}, tmp_path / "x.safetensors.index", metadata=header)
    if problem is None:  # consistent, if not what was written
        load_tensors(tmp_path, "x")
        return
    with pytest.raises(CheckpointError, match=problem):
        load_tensors(tmp_path, "x")


def test_a_host_copy_is_independent_of_the_tensor_and_its_buffer_is_reused(tmp_path):
    copies, weight = HostBuffers(), torch.arange(4.0)
    first = copies.copy({"w": weight})["w"]
    weight += 1
    assert first.tolist() == [0, 1, 2, 3]
    second = copies.copy({"w": weight})["w"]
    assert second.tolist() == [1, 2, 3, 4]
    assert second.data_ptr() == first.data_ptr()
    assert copies.copy({"w": torch.ones(2, dtype=torch.float64)})["w"].tolist() == [1, 1]
