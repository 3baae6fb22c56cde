"""Blocks of queries and keys that attention computes, from segments, on the host.

Work and memory are one number per query and one per pair of blocks; nothing has a number per query and key.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from thresher.models.attention.segments import Segment

Integers = npt.NDArray[np.int64]


class VisibleKeys(NamedTuple):
    """Each query attends to keys own_start..own_stop and prefix_start..prefix_stop, which do not overlap: [queries]."""

    own_start: Integers
    own_stop: Integers
    prefix_start: Integers
    prefix_stop: Integers


class BlockLists(NamedTuple):
    """Blocks by row of blocks, as FlexAttention reads them: how many are listed, and their columns, listed ones first.

    num_: [rows], the others: [rows, columns]. Blocks with some but not all pairs visible are partial; a block that
    extends over the edge is never full.
    """

    num_partial: Integers
    partial: Integers
    num_full: Integers
    full: Integers


def visible_keys(segments: tuple[Segment, ...], window: int | None) -> VisibleKeys:
    """Return the keys that each query sees. A window counts positions: a segment continues where its prefix ends."""
    fields = np.array([(s.start, s.stop, s.prefix_start, s.prefix_stop) for s in segments], dtype=np.int64)
    lengths = fields[:, 1] - fields[:, 0]
    start, _, prefix_start, prefix_stop = np.repeat(fields, lengths, axis=0).T
    inner = np.arange(len(start)) - np.repeat(lengths.cumsum() - lengths, lengths)  # index in the segment
    row = start + inner
    if window is not None:
        prefix_length = prefix_stop - prefix_start
        outside = prefix_length + inner + 1 - window  # positions from the first on that are too far back
        start = np.maximum(start, row + 1 - window)
        prefix_start = prefix_start + np.clip(outside, 0, prefix_length)
    return VisibleKeys(start, row + 1, prefix_start, prefix_stop)


def block_lists(keys: VisibleKeys, num_keys: int, block_size: int) -> tuple[BlockLists, BlockLists]:
    """Return the key blocks of each query block, and the query blocks of each key block."""
    visible = _count_visible_pairs(keys, num_keys, block_size)
    is_full = visible == block_size**2
    is_partial = (visible > 0) & ~is_full
    return (
        BlockLists(*_listed(is_partial), *_listed(is_full)),
        BlockLists(*_listed(is_partial.T), *_listed(is_full.T)),
    )


def _count_visible_pairs(keys: VisibleKeys, num_keys: int, block_size: int) -> Integers:
    """Count the visible pairs of each query block and key block: [query blocks, key blocks]."""
    num_queries = len(keys.own_start)
    rows, columns = -(-num_queries // block_size), -(-num_keys // block_size)
    # a query that sees keys start..stop sees those below `stop` except those below `start`
    edges = np.concatenate([keys.own_stop, keys.prefix_stop, keys.own_start, keys.prefix_start])
    signs = np.repeat([1, 1, -1, -1], num_queries)
    edge_block, rest = np.divmod(edges, block_size)
    cell = np.tile(np.arange(num_queries) // block_size, 4) * (columns + 1) + edge_block
    size = rows * (columns + 1)
    num_edges = np.bincount(cell, weights=signs, minlength=size).reshape(rows, columns + 1)
    below_edges = np.bincount(cell, weights=signs * rest, minlength=size).reshape(rows, columns + 1)
    # all keys of a block are below an edge in a later block; in the block of the edge, `rest` keys are
    later_edges = num_edges[:, :0:-1].cumsum(axis=1)[:, ::-1]
    visible = block_size * later_edges + below_edges[:, :-1]
    return visible.astype(np.int64)  # from exact sums in fp64


def _listed(blocks: npt.NDArray[np.bool_]) -> tuple[Integers, Integers]:
    return blocks.sum(axis=1), np.argsort(~blocks, axis=1, kind="stable")
