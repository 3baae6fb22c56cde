"""Sharded tensors in safetensors files: which shards a process writes, and any slice of any tensor read back.

A process reads only the slices that it needs, however many processes wrote the files, and without communication. Of the
files it opens only those with such slices, and keeps few of them open.

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
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from thresher import durable
from thresher.checkpoint.tensor_index import (
    BLOCKS,
    HEADER_KEY,
    WHOLE,
    Shape,
    ShardFile,
    Specs,
    TensorIndex,
    flat_blocks,
    index_name,
    load_index,
    merge,
    open_file,
    read_header,
    translate_tensor_errors,
)
from thresher.distributed.tensors import local_slices, to_local
from thresher.errors import CheckpointError

Slices = tuple[slice, ...]
_MAX_OPEN_FILES = 16


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


def pack_headers(directory: Path, names: Sequence[str]) -> dict[str, bytes]:
    """Return which blocks are in this process's files, by stem, of those that are one of several."""
    packed = {}
    for path in map(directory.joinpath, names):
        if (parsed := ShardFile.parse(path.name)) is not None:
            try:
                index = read_header(path, *parsed, open_file(path))
            except CheckpointError as error:  # the file was just written: a failing disk, not a damaged checkpoint
                raise error.__cause__ if isinstance(error.__cause__, OSError) else error from None
            # compressed: rank 0 receives the names of tensors once per writer
            packed[parsed[0]] = zlib.compress(json.dumps(index.header).encode() + b"\n" + index.blocks.tobytes())
    return packed


def save_indexes(directory: Path, packed: Sequence[Mapping[str, bytes]]) -> list[str]:
    """Write one index file per stem from what `pack_headers` returned on all ranks; return the file names."""
    names = []
    for stem in sorted({stem for of_rank in packed for stem in of_rank}):
        index = merge((_unpack(stem, each[stem]) for each in packed if stem in each), directory)
        is_small = index.blocks.max(initial=0) < 2**31
        blocks = torch.from_numpy(index.blocks).to(torch.int32 if is_small else torch.int64)
        names.append(index_name(stem))
        _write(directory / names[-1], {BLOCKS: blocks}, index.header)
    return names


def _unpack(stem: str, packed: bytes) -> TensorIndex:
    header, _, blocks = zlib.decompress(packed).partition(b"\n")
    return TensorIndex.from_header(stem, json.loads(header), np.frombuffer(blocks, np.int64))


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


class _Piece(NamedTuple):
    """A part of a slice that is to be read from one block."""

    file: int
    name: str
    start: int  # of the block in a stored 1-D tensor, or WHOLE
    shape: Shape  # of the block
    wanted: Slices  # of the block
    position: Slices  # in the result


class ShardedReader(contextlib.AbstractContextManager["ShardedReader"]):
    """The tensors of one stem. `tied` maps a name to the tensor that it shares memory with."""

    def __init__(self, directory: Path, stem: str):
        self._directory = directory
        self._open = lru_cache(_MAX_OPEN_FILES)(lambda name: open_file(directory / name))
        index = self._index = load_index(directory, stem, self._open)
        self.tied = index.tied
        ends = np.cumsum(index.num_blocks).tolist()
        self._rows = dict(zip(index.specs, map(slice, [0, *ends], ends), strict=True))

    def __exit__(self, *_: object) -> None:
        self._open.cache_clear()

    def __iter__(self) -> Iterator[str]:
        return iter(self._index.specs)

    def specs(self) -> Specs:
        """Return shape and dtype of every tensor, tied ones included."""
        specs = self._index.specs
        return {**specs, **{name: specs[first] for name, first in self.tied.items()}}

    def shape(self, name: str) -> Shape:
        return self._index.specs[self.tied.get(name, name)][0]

    def read(self, name: str, slices: Slices | None = None) -> Tensor:
        """Read a tensor, or a slice of it, from the shards that overlap it."""
        shape, dtype = self._index.specs[self.tied.get(name, name)]
        slices = _full(shape) if slices is None else slices
        result = torch.empty([each.stop - each.start for each in slices], dtype=dtype)
        self.read_into({name: (result, slices)})
        return result

    def read_into(self, targets: Mapping[str, tuple[Tensor, Slices]]) -> None:
        """Read a slice of each tensor into a target of the same shape, file by file."""
        pieces = [piece for name, (_, slices) in targets.items() for piece in self._pieces(name, slices)]
        for piece in sorted(pieces, key=lambda each: each.file):
            targets[piece.name][0][piece.position].copy_(self._read_piece(piece))

    def read_flat(self, name: str, start: int, stop: int) -> Tensor:
        """Read the elements [start, stop) of a flattened tensor."""
        shape, dtype = self._index.specs[self.tied.get(name, name)]
        blocks = [
            self.read(name, tuple(slice(first, first + size) for first, size in zip(offset, sizes, strict=True)))
            for offset, sizes in flat_blocks(shape, start, stop)
        ]
        return torch.cat([torch.empty(0, dtype=dtype), *(block.reshape(-1) for block in blocks)])

    def _pieces(self, name: str, slices: Slices) -> Iterator[_Piece]:
        rows, num_dims = self._rows[self.tied.get(name, name)], len(slices)
        offsets, sizes = self._index.offsets[rows, :num_dims], self._index.sizes[rows, :num_dims]
        first = np.maximum(offsets, [each.start for each in slices])
        last = np.minimum(offsets + sizes, [each.stop for each in slices])
        for at in np.flatnonzero((first < last).all(axis=1)):
            file, start = self._index.blocks[rows][at, :2].tolist()
            overlap = [slice(*each) for each in zip(first[at].tolist(), last[at].tolist(), strict=True)]
            wanted = _shift(overlap, offsets[at].tolist())
            position = _shift(overlap, [each.start for each in slices])
            yield _Piece(file, name, start, tuple(sizes[at].tolist()), wanted, position)

    def _read_piece(self, piece: _Piece) -> Tensor:
        file, name = self._index.file(piece.file), self.tied.get(piece.name, piece.name)
        opened, (_, dtype) = self._open(file), self._index.specs[name]
        with translate_tensor_errors(self._directory / file):
            if piece.start == WHOLE:
                is_all = piece.wanted == _full(piece.shape)
                values: Tensor = opened.get_tensor(name) if is_all else opened.get_slice(name)[piece.wanted]
            else:
                # rows are consecutive in the file; other dimensions are sliced in memory
                row, rows = prod(piece.shape[1:]), piece.wanted[0]
                values = opened.get_slice(name)[piece.start + rows.start * row : piece.start + rows.stop * row]
                values = values.view(-1, *piece.shape[1:])[(slice(None), *piece.wanted[1:])]
            expected = tuple(each.stop - each.start for each in piece.wanted)
            if (tuple(values.shape), values.dtype) != (expected, dtype):
                raise ValueError(f"its shard of {name} is not the one in the index")
        return values


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
        specs = reader.specs()
        tensors = {name: torch.empty(specs[name][0], dtype=specs[name][1]) for name in reader}
        reader.read_into({name: (each, local_slices(each)) for name, each in tensors.items()})
        return tensors | {name: tensors[first] for name, first in reader.tied.items()}


def _full(shape: Shape) -> Slices:
    return tuple(slice(0, size) for size in shape)


def _shift(slices: Sequence[slice], origin: Sequence[int]) -> Slices:
    """Make slices relative to an origin."""
    return tuple(slice(each.start - first, each.stop - first) for each, first in zip(slices, origin, strict=True))
