"""FlexAttention over segments, for GPUs: the segments as a block mask, and a bounded number of compiled kernels.

The blocks are listed on the host, because `create_block_mask` allocates a number per query and key. Here, work and
memory are one number per query and one per pair of blocks. The backward has no CPU kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from thresher.distributed.tensors import copy_arrays_to_device
from thresher.errors import UserError
from thresher.models.attention.segments import Segment

BLOCK_SIZE = 128
# variants differ in dtype, in gradients, and in whether queries or keys fit into one block; a model needs 14 at most,
# and twice as many if only some of its layers have sinks
MAX_COMPILED_VARIANTS = 32
# fields of two `BlockLists`: key blocks by query block, then query blocks by key block
_LIST_NAMES = [
    f"{full}{side}_{what}" for side in ("kv", "q") for full in ("", "full_") for what in ("num_blocks", "indices")
]


def block_mask(segments: tuple[Segment, ...], num_keys: int, window: int | None, device: torch.device) -> BlockMask:
    """Build the mask from four integers per query; a window is part of them, so all layers share kernels."""
    keys = visible_keys(segments, window)
    lists = [blocks[None, None] for side in block_lists(keys, num_keys, BLOCK_SIZE) for blocks in side]
    own_start, own_stop, prefix_start, prefix_stop, *listed = copy_arrays_to_device([*keys, *lists], device)

    def is_visible(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        in_prefix = (key >= prefix_start[query]) & (key < prefix_stop[query])
        return in_prefix | ((key >= own_start[query]) & (key < own_stop[query]))

    named: dict[str, Any] = dict(zip(_LIST_NAMES, listed, strict=True))
    lengths = len(keys.own_start), num_keys
    return BlockMask(lengths, **named, BLOCK_SIZE=(BLOCK_SIZE, BLOCK_SIZE), mask_mod=is_visible)


def flex_segment_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: BlockMask,
    scale: float,
    softcap: float | None,
    attend: Callable[..., Any] = flex_attention,  # uncompiled, it allocates the scores of all queries and keys
    sinks: Tensor | None = None,
) -> Tensor:
    """query [1, heads, queries, dim], key and value [1, kv heads, rows, dim], sinks [heads] -> like query."""

    def capped(score: Tensor, *_indices: Tensor) -> Tensor:
        return score if softcap is None else softcap * torch.tanh(score / softcap)

    enable_gqa = query.shape[1] != key.shape[1]
    settings = {"score_mod": capped, "block_mask": mask, "scale": scale, "enable_gqa": enable_gqa}
    out: Tensor
    if sinks is None:
        out = attend(query, key, value, **settings)
        return out
    out, sums = attend(query, key, value, **settings, return_aux=AuxRequest(lse=True))
    # the share of the softmax that the keys have besides the sink
    return (out * torch.sigmoid(sums.lse - sinks.to(sums.lse.dtype)[:, None]).unsqueeze(-1)).to(out.dtype)


@lru_cache(maxsize=1)
def compiled_flex_attention() -> Callable[..., Tensor]:
    """Return the compiled FlexAttention of this process."""
    return compile_flex_attention("inductor", MAX_COMPILED_VARIANTS)


def compile_flex_attention(backend: str | Callable[..., Any], max_variants: int) -> Callable[..., Tensor]:
    """Compile FlexAttention for rows of any length; more than `max_variants` compilations are an error.

    By default torch would continue uncompiled, with scores of heads x queries x keys. The limit applies to this
    function alone.
    """
    from torch._dynamo import config  # slow to import
    from torch._dynamo.exc import FailOnRecompileLimitHit

    compiled: Callable[..., Tensor] = torch.compile(  # type: ignore[call-overload]  # stubs lack two parameters
        flex_attention,
        backend=backend,
        dynamic=True,
        fullgraph=True,
        recompile_limit=max_variants,
        isolate_recompiles=True,
        # one operation for dispatch modes: selective recomputation keeps its results
        options={"wrap_inductor_compiled_regions": True} if backend == "inductor" else None,
    )

    def attend(*tensors: Tensor, **settings: Any) -> Tensor:
        specialized = config.specialize_float
        # a soft cap that is not a constant has no backward in torch 2.13; `config.patch` is slow, and each layer calls
        config.specialize_float = True
        try:
            out: Tensor = compiled(*tensors, **settings)
        except FailOnRecompileLimitHit as error:
            raise UserError(
                f"FlexAttention was compiled for {max_variants} kinds of inputs, and this micro-batch needs another "
                "kernel; set layout=padded, and report the messages of a run with TORCH_LOGS=recompiles"
            ) from error
        finally:
            config.specialize_float = specialized
        return out

    return attend


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
    by_query = BlockLists(*_listed(is_partial), *_listed(is_full))
    return by_query, BlockLists(*_listed(is_partial.T), *_listed(is_full.T))


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
