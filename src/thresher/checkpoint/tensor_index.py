"""The index of a stem: the blocks of each tensor, and the files that they are in.

It is read from the headers of the files. If several processes have written a checkpoint, one file has the index of
all, `<stem>.safetensors.index`, because every process needs it at a restore. Checks and searches work on arrays: 1,024
writers of a model of 70B write 740,000 blocks of weights.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open

from thresher.checkpoint.json_io import translate_read_errors
from thresher.errors import CheckpointError

Shape = tuple[int, ...]
Specs: TypeAlias = "Mapping[str, tuple[Shape, torch.dtype]]"  # by name

# a single header key: safetensors writes several in random order, and equal states must give equal bytes
HEADER_KEY = "thresher"
WHOLE = -1
BLOCKS = "blocks"
_PARSE_ERRORS = (SafetensorError, ValueError, TypeError, AttributeError, LookupError, OverflowError, RuntimeError)
_HINT = "resume from a different checkpoint"


@dataclass(frozen=True)
class ShardFile:
    """The file of one writing process, `index` of `count`."""

    index: int = 0
    count: int = 1

    def name(self, stem: str) -> str:
        """Return the file name; a single file has the plain name that any safetensors reader expects."""
        if self.count == 1:
            return f"{stem}.safetensors"
        return f"{stem}-{self.index + 1:05d}-of-{self.count:05d}.safetensors"

    @classmethod
    def parse(cls, name: str) -> tuple[str, ShardFile] | None:
        """Return stem and number of a file that is one of several; None for other names."""
        match = re.fullmatch(r"(.+)-(\d{5,})-of-(\d{5,})\.safetensors", name)
        return (match[1], cls(int(match[2]) - 1, int(match[3]))) if match else None


@dataclass(frozen=True)
class TensorIndex:
    """The tensors of a stem and their blocks.

    A row of `blocks` has the number of a file; the first element in a stored 1-D tensor, or WHOLE if the block is
    stored as it is; offset and size of the block, both padded to the most dimensions of a tensor. The blocks of a
    tensor are consecutive rows, in the order of `specs`. `tied` maps a name to the tensor that it shares memory with.
    """

    stem: str
    num_files: int
    specs: Specs
    num_blocks: Sequence[int]  # of each tensor
    blocks: npt.NDArray[np.int64]
    tied: Mapping[str, str] = field(default_factory=dict)

    @property
    def num_dims(self) -> int:
        return int(self.blocks.shape[1] - 2) // 2

    @property
    def offsets(self) -> npt.NDArray[np.int64]:
        return self.blocks[:, 2 : 2 + self.num_dims]

    @property
    def sizes(self) -> npt.NDArray[np.int64]:
        return self.blocks[:, 2 + self.num_dims :]

    def file(self, number: int) -> str:
        return ShardFile(number, self.num_files).name(self.stem)

    @property
    def header(self) -> dict[str, Any]:
        """All but the blocks, for JSON."""
        specs = zip(self.specs.items(), self.num_blocks, strict=True)
        rows = [
            [name, list(shape), str(dtype).removeprefix("torch."), count] for (name, (shape, dtype)), count in specs
        ]
        return {"num_files": self.num_files, "tensors": rows}

    @classmethod
    def from_header(cls, stem: str, header: Any, blocks: npt.NDArray[Any]) -> TensorIndex:
        num_files, rows = header["num_files"], header["tensors"]
        specs = {name: (tuple(map(int, shape)), _dtype(dtype)) for name, shape, dtype, _ in rows}
        num_blocks = [int(count) for *_, count in rows]
        if len(specs) != len(rows) or min(num_blocks, default=0) < 0:
            raise ValueError("it has a tensor twice, or fewer than no blocks")
        table = blocks.astype(np.int64, copy=False).reshape(sum(num_blocks), 2 + 2 * _num_dims(specs))
        return cls(stem, int(num_files), specs, num_blocks, table)


def index_name(stem: str) -> str:
    # a pattern such as `*.safetensors` does not match it
    return f"{stem}.safetensors.index"


def open_file(path: Path) -> Any:
    """Open a safetensors file."""
    with translate_tensor_errors(path):
        try:
            # pread, not mmap: the tensors outlive the checkpoint, which retention may delete
            return safe_open(path, framework="pt", backend="pread")
        except FileNotFoundError:  # whatever the reason was
            path.open("rb").close()
            raise


def translate_tensor_errors(path: Path) -> AbstractContextManager[None]:
    return translate_read_errors(path, "a readable safetensors file", *_PARSE_ERRORS)


def load_index(directory: Path, stem: str, opened: Callable[[str], Any]) -> TensorIndex:
    """Read the index of a stem from its file, or from the headers of all files: `opened` opens one by its name."""
    path = directory / index_name(stem)
    if path.exists():
        file = opened(path.name)
        with translate_tensor_errors(path):
            index = TensorIndex.from_header(stem, _header(file), file.get_tensor(BLOCKS).numpy())
    else:
        with translate_tensor_errors(directory):
            found = [ShardFile.parse(each.name) for each in directory.glob(f"{stem}-*")]
        # one checkpoint has the files of one save; if any are missing, opening them by name reports which
        count = max((each[1].count for each in found if each is not None and each[0] == stem), default=1)
        files = {file.name(stem): file for file in (ShardFile(number, count) for number in range(count))}
        headers = (read_header(directory / name, stem, file, opened(name)) for name, file in files.items())
        index = merge(headers, directory)
    with translate_tensor_errors(directory):
        _check(index, directory)
    return index


def read_header(path: Path, stem: str, file: ShardFile, opened: Any) -> TensorIndex:
    """Read the blocks of one file; those of a flat shard are consecutive in it."""
    with translate_tensor_errors(path):
        return _of_header(path, stem, file, opened)


def _of_header(path: Path, stem: str, file: ShardFile, opened: Any) -> TensorIndex:
    header = _header(opened)
    parts, ranges = header.get("parts", {}), header.get("flat", {})
    specs: dict[str, tuple[Shape, torch.dtype]] = {}
    blocks: list[list[tuple[int, Shape, Shape]]] = []
    dtypes: dict[str, torch.dtype] = {}
    for name in opened.keys():  # noqa: SIM118
        stored = opened.get_slice(name)
        shape, code = tuple(stored.get_shape()), stored.get_dtype()
        if code not in dtypes:
            dtypes[code] = (stored[:0] if shape and prod(shape) else opened.get_tensor(name)).dtype
        if name in ranges:
            sizes, first = ranges[name]
            full = tuple(sizes)
            if len(shape) != 1 or not 0 <= first <= first + shape[0] <= prod(full):
                raise _mismatch(path, name)
            blocks.append(list(_flat(full, first, first + shape[0])))
        else:
            full, offset = map(tuple, parts.get(name, (shape, (0,) * len(shape))))
            if not len(full) == len(offset) == len(shape):
                raise _mismatch(path, name)
            blocks.append([(WHOLE, offset, shape)] if prod(shape) else [])
        specs[name] = full, dtypes[code]
    num_dims = _num_dims(specs)
    rows = [
        (file.index, start, *offset, *[0] * (num_dims - len(offset)), *size, *[1] * (num_dims - len(size)))
        for of_tensor in blocks
        for start, offset, size in of_tensor
    ]
    table = np.array(rows, np.int64).reshape(len(rows), 2 + 2 * num_dims)
    return TensorIndex(stem, file.count, specs, list(map(len, blocks)), table, header.get("tied", {}))


def merge(indexes: Iterable[TensorIndex], directory: Path) -> TensorIndex:
    """Merge the indexes of all files, one after the other; at least one.

    Two files may both have a block of a tensor that their writers share.
    """
    specs: dict[str, tuple[Shape, torch.dtype]] = {}
    numbers: dict[str, int] = {}  # of the tensors, as they are found
    tied: dict[str, str] = {}
    tables, owners = [], []
    for number, index in enumerate(indexes):
        tied |= index.tied
        for name, spec in index.specs.items():
            numbers.setdefault(name, len(numbers))
            if specs.setdefault(name, spec) != spec:
                raise _mismatch(directory / index.file(number), name)
        own = np.array([numbers[name] for name in index.specs], np.int64)
        owners.append(np.repeat(own, np.array(index.num_blocks, np.int64)))
        tables.append(index.blocks)
    specs = dict(sorted(specs.items()))
    num_dims = _num_dims(specs)
    blocks = np.concatenate([_widen(table, num_dims) for table in tables])
    rank = np.zeros(len(specs), np.int64)
    rank[[numbers[name] for name in specs]] = np.arange(len(specs))
    tensors = rank[np.concatenate(owners)]
    offsets = blocks[:, 2 : 2 + num_dims]
    order = np.lexsort((*offsets.T[::-1], tensors))
    blocks, tensors, offsets = blocks[order], tensors[order], offsets[order]
    is_first = np.ones(len(order), bool)
    is_first[1:] = (tensors[1:] != tensors[:-1]) | (offsets[1:] != offsets[:-1]).any(axis=1)
    num_blocks = np.bincount(tensors[is_first], minlength=len(specs)).tolist()
    return TensorIndex(index.stem, index.num_files, specs, num_blocks, blocks[is_first], tied)


def _check(index: TensorIndex, directory: Path) -> None:
    """Reject blocks outside of their tensor, and a tensor that lacks blocks."""
    names = list(index.specs)
    shapes = [(*shape, *[1] * (index.num_dims - len(shape))) for shape, _ in index.specs.values()]
    full = np.array(shapes, np.int64).reshape(len(names), index.num_dims)
    limits = np.repeat(full, index.num_blocks, axis=0)
    files, starts = index.blocks[:, 0], index.blocks[:, 1]
    is_wrong = ((index.offsets < 0) | (index.sizes < 1) | (index.offsets > limits - index.sizes)).any(axis=1)
    is_wrong |= (files < 0) | (files >= index.num_files) | (starts < WHOLE)
    ends = np.cumsum(index.num_blocks, dtype=np.int64)
    if is_wrong.any():
        row = int(is_wrong.argmax())
        raise _mismatch(directory / index.file(int(files[row])), names[int(np.searchsorted(ends, row, side="right"))])
    elements = np.concatenate([[0], np.cumsum(index.sizes.prod(axis=1))])
    stored = elements[ends] - elements[ends - np.array(index.num_blocks, np.int64)]
    for name, (shape, _), count in zip(names, index.specs.values(), stored.tolist(), strict=True):
        if count != prod(shape):
            raise CheckpointError(f"{directory} lacks shards of {name}; {_HINT}")


def flat_blocks(shape: Shape, start: int, stop: int) -> Iterator[tuple[Shape, Shape]]:
    """Split the elements [start, stop) of a flattened tensor into contiguous blocks, in order: (offset, shape) each."""
    if start >= stop:
        return
    if len(shape) < 2:
        yield (start,) * len(shape), (stop - start,) * len(shape)
        return
    row = prod(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows
    if first > last:  # inside one row
        yield from _in_row(shape, last, start, stop)
        return
    yield from _in_row(shape, first - 1, start, first * row)
    if first < last:
        yield (first, *[0] * (len(shape) - 1)), (last - first, *shape[1:])
    yield from _in_row(shape, last, last * row, stop)


def _in_row(shape: Shape, index: int, start: int, stop: int) -> Iterator[tuple[Shape, Shape]]:
    begin = index * prod(shape[1:])
    for offset, block in flat_blocks(shape[1:], start - begin, stop - begin):
        yield (index, *offset), (1, *block)


def _flat(shape: Shape, start: int, stop: int) -> Iterator[tuple[int, Shape, Shape]]:
    stored = 0
    for offset, size in flat_blocks(shape, start, stop):
        yield stored, offset, size
        stored += prod(size)


def _header(opened: Any) -> Any:
    return json.loads((opened.metadata() or {}).get(HEADER_KEY, "{}"))


def _num_dims(specs: Specs) -> int:
    return max((len(shape) for shape, _ in specs.values()), default=0)


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name} is not a dtype")
    return dtype


def _widen(blocks: npt.NDArray[np.int64], num_dims: int) -> npt.NDArray[np.int64]:
    own = (blocks.shape[1] - 2) // 2
    added = ((0, 0), (0, num_dims - own))
    return np.concatenate(
        [np.pad(blocks[:, : 2 + own], added), np.pad(blocks[:, 2 + own :], added, constant_values=1)], axis=1
    )


def _mismatch(file: Path, name: str) -> CheckpointError:
    return CheckpointError(f"{file} has a shard of {name} that does not match the others; {_HINT}")
