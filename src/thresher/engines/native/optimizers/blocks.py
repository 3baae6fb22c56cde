"""Blocks of an 8-bit state: 256 consecutive elements of a parameter, with one scale.

bitsandbytes counts them from the start of a shard. If all shards start between two blocks of the whole parameter, the
state does not depend on the sharding, and checkpoints have it by block.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

BLOCK = 256
_SMALLEST = 4096
BYTES_PER_ELEMENT = 1 + 4 / BLOCK


def has_blocks(num_dims: int, num_elements: int) -> bool:
    """Whether a parameter has its state in blocks; vectors and small matrices have it in fp32."""
    return num_dims > 1 and num_elements >= _SMALLEST


def num_blocks(num_elements: int) -> int:
    return -(-num_elements // BLOCK)


def blocks_of_shard(shape: Sequence[int], slices: Sequence[slice]) -> slice | None:
    """Return the blocks of a parameter that a shard consists of; None if it does not consist of whole ones."""
    if any(each.start >= each.stop for each in slices):
        return slice(0, 0)
    row, whole = prod(shape[1:]), prod(shape)
    start, stop = slices[0].start * row, slices[0].stop * row
    has_whole_rows = all(each.stop - each.start == size for each, size in zip(slices[1:], shape[1:], strict=True))
    if not has_whole_rows or start % BLOCK or (stop % BLOCK and stop != whole):
        return None
    return slice(start // BLOCK, num_blocks(stop))
