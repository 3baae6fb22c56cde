"""Sharded tensors in safetensors files: which shards a process writes, and any slice of any tensor read back.

A process reads only the slices that it needs, however many processes wrote the files, and without communication.

Decides what happens to tensors that safetensors rejects: names of the same memory (tied weights) are written once and
are tied again after loading; overlapping views are written as separate copies; other strides are made contiguous. The
header of a file stores the global shape of its shards, and their offset: of blocks under `parts`, of elements of the
flattened tensor under `flat`.
"""

from __future__ import annotations

import contextlib
import errno
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from thresher import durable
from thresher.checkpoint.json_io import translate_read_errors
from thresher.distributed.tensors import local_slices, to_local
from thresher.errors import CheckpointError

Shape = tuple[int, ...]
Slices = tuple[slice, ...]


@dataclass(frozen=True)
class TensorShard:
    """A contiguous block of a global tensor: `values` at `offset` in a tensor of `shape`."""

    values: Tensor
    shape: Shape
    offset: Shape

    @property
    def is_full(self) -> bool:
        return tuple(self.values.shape) == self.shape


@dataclass(frozen=True)
class FlatShard:
    """Consecutive elements of a global tensor in row-major order: 1-D `values` from element `start` of `shape`."""

    values: Tensor
    shape: Shape
    start: int

    @property
    def is_full(self) -> bool:
        return self.values.numel() == prod(self.shape)


Shard: TypeAlias = TensorShard | FlatShard


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


def shards_to_write(
    tensors: Mapping[str, Tensor], sharded_like: Mapping[str, Tensor], owns: Callable[[Tensor], bool]
) -> dict[str, TensorShard]:
    """Return the shards that this process writes: of replicas, exactly one process owns each.

    `tensors` may be plain local shards; `sharded_like` has tensors of the same names and sharding.
    """
    shards = {}
    for name, tensor in tensors.items():
        like = sharded_like[name]
        if owns(like):
            offset = tuple(each.start for each in local_slices(like))
            shards[name] = TensorShard(to_local(tensor).detach(), tuple(like.shape), offset)
    # with more processes than rows, some have an empty shard
    return {name: shard for name, shard in shards.items() if shard.values.numel() or shard.is_full}


# a single header key: safetensors writes several in random order, and equal states must give equal bytes
HEADER_KEY = "thresher"


def save_tensors(directory: Path, stem: str, tensors: Mapping[str, Tensor]) -> str:
    """Write tensors to `<stem>.safetensors`; return the file name."""
    first_names, tied = _find_tied(tensors)
    name = f"{stem}.safetensors"
    _write(directory / name, first_names, {"tied": tied} if tied else {})
    return name


def save_shards(directory: Path, stem: str, shards: Mapping[str, Shard], file: ShardFile) -> str:
    """Write one process's shards into its file; return the file name."""
    partial = {name: shard for name, shard in shards.items() if not shard.is_full}
    blocks = {name: [list(s.shape), list(s.offset)] for name, s in partial.items() if isinstance(s, TensorShard)}
    ranges = {name: [list(s.shape), s.start] for name, s in partial.items() if isinstance(s, FlatShard)}
    header = {key: positions for key, positions in (("parts", blocks), ("flat", ranges)) if positions}
    values = {name: shard.values.view(shard.shape) if shard.is_full else shard.values for name, shard in shards.items()}
    _write(directory / file.name(stem), values, header)
    return file.name(stem)


def _find_tied(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    first_names: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    name_of_memory: dict[tuple[object, ...], str] = {}
    for name, tensor in sorted(tensors.items()):
        memory = (tensor.device, tensor.dtype, tensor.data_ptr(), tensor.shape, tensor.stride())
        # all empty tensors have address 0 and share nothing
        first = name_of_memory.setdefault(memory, name) if tensor.numel() else name
        if first == name:
            first_names[name] = tensor
        else:
            tied[name] = first
    return first_names, tied


def _write(path: Path, tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> None:
    metadata = {HEADER_KEY: json.dumps(header, sort_keys=True)} if header else None
    path.touch()
    mode = path.stat().st_mode
    try:
        save_file(_unshared(tensors), path, metadata=metadata)
    except SafetensorError as error:
        # the OS error is only in its text; callers translate an OSError into advice
        match = re.search(r"\(os error (\d+)\)", str(error))
        raise OSError(int(match[1]) if match else errno.EIO, str(error)) from error
    # safetensors creates files that only their owner may read; use the mode of the user's umask
    path.chmod(mode)
    # on a network file system, only the rank that wrote a file can flush it
    durable.sync_file(path)


def _unshared(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors in contiguous CPU memory that no two of them share."""
    plain: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        dense = tensor.detach().cpu().contiguous()
        storage = dense.untyped_storage()
        if storage.nbytes() != dense.nbytes or storage.data_ptr() in seen:
            dense = dense.clone()
        seen.add(dense.untyped_storage().data_ptr())
        plain[name] = dense
    return plain


@dataclass(frozen=True)
class _StoredBlock:
    """A block of a tensor in a file."""

    shape: Shape
    file: str
    start: int | None = None  # its first element in a stored 1-D tensor; None if it is stored as it is


@dataclass
class _GlobalTensor:
    """A tensor and its stored blocks by offset."""

    shape: Shape
    dtype: torch.dtype
    blocks: dict[Shape, _StoredBlock]


class ShardedReader(contextlib.AbstractContextManager["ShardedReader"]):
    """The tensors of one stem. `tied` maps a name to the tensor that it shares memory with."""

    def __init__(self, directory: Path, stem: str):
        self._directory = directory
        self._files: dict[str, Any] = {}
        self._tensors: dict[str, _GlobalTensor] = {}
        self.tied: dict[str, str] = {}
        for file in _file_names(directory, stem):
            with self._translate_errors(file):
                self._open(file)
        for name, tensor in self._tensors.items():
            if sum(prod(block.shape) for block in tensor.blocks.values()) != prod(tensor.shape):
                raise CheckpointError(f"{directory} lacks shards of {name}; resume from a different checkpoint")

    def __exit__(self, *_: object) -> None:
        self._files.clear()

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def specs(self) -> dict[str, tuple[Shape, torch.dtype]]:
        """Return shape and dtype of every tensor, tied ones included."""
        specs = {name: (tensor.shape, tensor.dtype) for name, tensor in self._tensors.items()}
        return specs | {name: specs[first] for name, first in self.tied.items()}

    def shape(self, name: str) -> Shape:
        return self._tensors[self.tied.get(name, name)].shape

    def read(self, name: str, slices: Slices | None = None) -> Tensor:
        """Read a tensor, or a slice of it, from the shards that overlap it."""
        name = self.tied.get(name, name)
        tensor = self._tensors[name]
        slices = _full(tensor.shape) if slices is None else slices
        result = torch.empty([each.stop - each.start for each in slices], dtype=tensor.dtype)
        for offset, block in tensor.blocks.items():
            overlap = [
                slice(max(wanted.start, first), min(wanted.stop, first + size))
                for wanted, first, size in zip(slices, offset, block.shape, strict=True)
            ]
            if any(each.start >= each.stop for each in overlap):
                continue
            with self._translate_errors(block.file):
                values = _read_block(self._files[block.file], name, block, _shift(overlap, offset))
            if values.shape == result.shape:  # one block contains it all: no copy needed
                result = values
                break
            result[_shift(overlap, [wanted.start for wanted in slices])] = values
        return result

    def read_flat(self, name: str, start: int, stop: int) -> Tensor:
        """Read the elements [start, stop) of a flattened tensor."""
        tensor = self._tensors[self.tied.get(name, name)]
        blocks = [
            self.read(name, tuple(slice(first, first + size) for first, size in zip(offset, shape, strict=True)))
            for offset, shape in flat_blocks(tensor.shape, start, stop)
        ]
        return torch.cat([torch.empty(0, dtype=tensor.dtype), *(block.reshape(-1) for block in blocks)])

    def _open(self, file: str) -> None:
        # pread, not mmap: the tensors outlive the checkpoint, which retention may delete
        opened: Any = safe_open(self._directory / file, framework="pt", backend="pread")
        self._files[file] = opened
        header = json.loads((opened.metadata() or {}).get(HEADER_KEY, "{}"))
        self.tied |= header.get("tied", {})
        blocks, ranges = header.get("parts", {}), header.get("flat", {})
        for name in opened.keys():  # noqa: SIM118
            stored = opened.get_slice(name)
            shape = tuple(stored.get_shape())
            dtype = (stored[:0] if shape and prod(shape) else opened.get_tensor(name)).dtype
            if name in ranges:
                sizes, start = ranges[name]
                global_shape = tuple(sizes)
                is_inside = len(shape) == 1 and 0 <= start <= start + shape[0] <= prod(global_shape)
                found = list(_flat_blocks(global_shape, start, start + shape[0], file)) if is_inside else []
            else:
                global_shape, offset = map(tuple, blocks.get(name, (shape, (0,) * len(shape))))
                placed = zip(offset, shape, global_shape, strict=True)
                is_inside = all(0 <= first <= first + size <= full for first, size, full in placed)
                found = [(offset, _StoredBlock(shape, file))]
            tensor = self._tensors.setdefault(name, _GlobalTensor(global_shape, dtype, {}))
            if (tensor.shape, tensor.dtype) != (global_shape, dtype) or not is_inside:
                problem = f"{self._directory / file} has a shard of {name} that does not match the others"
                raise CheckpointError(f"{problem}; resume from a different checkpoint")
            tensor.blocks.update(found)  # two processes may both store a tensor that they share

    def _translate_errors(self, file: str) -> contextlib.AbstractContextManager[None]:
        parse_errors = (SafetensorError, ValueError, TypeError, AttributeError)
        return translate_read_errors(self._directory / file, "a readable safetensors file", *parse_errors)


class LocalShards(Mapping[str, Tensor]):
    """This process's slices of stored tensors, as a mapping that reads on access."""

    def __init__(self, reader: ShardedReader, slices_of: Callable[[str, Shape], Slices]):
        self._reader = reader
        self._slices_of = slices_of

    def __getitem__(self, name: str) -> Tensor:
        return self._reader.read(name, self._slices_of(name, self._reader.shape(name)))

    def __iter__(self) -> Iterator[str]:
        return iter(self._reader)

    def __len__(self) -> int:
        return len(list(self._reader))


def load_tensors(directory: Path, stem: str) -> dict[str, Tensor]:
    """Read all tensors of a stem in full."""
    with ShardedReader(directory, stem) as reader:
        tensors = {name: reader.read(name) for name in reader}
        return tensors | {name: tensors[first] for name, first in reader.tied.items()}


def _file_names(directory: Path, stem: str) -> list[str]:
    pattern = re.compile(rf"{re.escape(stem)}-(\d{{5,}})-of-(\d{{5,}})\.safetensors")
    counts = {int(match[2]) for path in directory.glob(f"{stem}-*") if (match := pattern.fullmatch(path.name))}
    # one checkpoint has the files of one save; if any are missing, opening them by name reports which
    count = max(counts, default=1)
    return [ShardFile(index, count).name(stem) for index in range(count)]


def _flat_blocks(shape: Shape, start: int, stop: int, file: str) -> Iterator[tuple[Shape, _StoredBlock]]:
    stored = 0
    for offset, block in flat_blocks(shape, start, stop):
        yield offset, _StoredBlock(block, file, stored)
        stored += prod(block)


def _read_block(opened: Any, name: str, block: _StoredBlock, slices: Slices) -> Tensor:
    if block.start is None:
        values: Tensor = opened.get_tensor(name) if slices == _full(block.shape) else opened.get_slice(name)[slices]
        return values
    # rows are consecutive in the file; other dimensions are sliced in memory
    row, rows = prod(block.shape[1:]), slices[0]
    values = opened.get_slice(name)[block.start + rows.start * row : block.start + rows.stop * row]
    return values.view(-1, *block.shape[1:])[(slice(None), *slices[1:])]


def _full(shape: Shape) -> Slices:
    return tuple(slice(0, size) for size in shape)


def _shift(slices: Sequence[slice], origin: Sequence[int]) -> Slices:
    """Make slices relative to an origin."""
    return tuple(slice(each.start - first, each.stop - first) for each, first in zip(slices, origin, strict=True))
