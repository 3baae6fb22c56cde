"""Sharded tensors of a checkpoint, writing side: which shards a process writes, and into which file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import TypeAlias

from torch import Tensor

from thresher.distributed.sharded_tensor import local_slices, to_local


@dataclass(frozen=True)
class TensorShard:
    """A contiguous block of a global tensor: `values` at `offset` in a tensor of `shape`."""

    values: Tensor
    shape: tuple[int, ...]
    offset: tuple[int, ...]

    @property
    def is_full(self) -> bool:
        return tuple(self.values.shape) == self.shape


@dataclass(frozen=True)
class FlatShard:
    """Consecutive elements of a global tensor in row-major order: 1-D `values` from element `start` of `shape`."""

    values: Tensor
    shape: tuple[int, ...]
    start: int

    @property
    def is_full(self) -> bool:
        return self.values.numel() == prod(self.shape)


Shard: TypeAlias = TensorShard | FlatShard


def flat_blocks(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
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


def _in_row(
    shape: tuple[int, ...], index: int, start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
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

    sharded_like: by the same names, tensors with the sharding of `tensors`, which may be plain local shards.
    """
    shards = {}
    for name, tensor in tensors.items():
        like = sharded_like[name]
        if owns(like):
            offset = tuple(each.start for each in local_slices(like))
            shards[name] = TensorShard(to_local(tensor).detach(), tuple(like.shape), offset)
    # with more processes than rows, some have an empty shard
    return {name: shard for name, shard in shards.items() if shard.values.numel() or shard.is_full}
