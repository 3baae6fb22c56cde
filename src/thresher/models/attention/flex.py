"""FlexAttention over segments, for GPUs, with the segments as a block mask. Its backward has no CPU kernel."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from thresher.distributed.host_copies import copy_to_device
from thresher.models.attention.segments import Segment, query_slices


def block_mask(segments: tuple[Segment, ...], num_keys: int, window: int | None, device: torch.device) -> BlockMask:
    """Build the mask from five integers per query and one per key."""
    num_queries = sum(segment.length for segment in segments)
    segment_start, row, prefix_start, prefix_stop = (torch.zeros(num_queries, dtype=torch.int32) for _ in range(4))
    position = torch.zeros(num_queries, dtype=torch.int32)
    key_position = torch.zeros(num_keys, dtype=torch.int32)
    for segment, queries in query_slices(segments):
        inner = torch.arange(segment.length, dtype=torch.int32)
        segment_start[queries], row[queries] = segment.start, segment.start + inner
        prefix_start[queries], prefix_stop[queries] = segment.prefix_start, segment.prefix_stop
        position[queries] = segment.prefix_length + inner
        key_position[segment.start : segment.stop] = segment.prefix_length + inner
        if segment.prefix_length and segment.prefix_stop == segment.start:  # a tail: its first rows are keys only
            key_position[segment.prefix_start : segment.prefix_stop] = torch.arange(segment.prefix_length)
    segment_start, row, prefix_start, prefix_stop, position, key_position = (
        copy_to_device(column, device)
        for column in (segment_start, row, prefix_start, prefix_stop, position, key_position)
    )

    def is_visible(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        in_prefix = (key >= prefix_start[query]) & (key < prefix_stop[query])
        visible = in_prefix | ((key >= segment_start[query]) & (key <= row[query]))
        return visible if window is None else visible & (position[query] - key_position[key] < window)

    return create_block_mask(is_visible, None, None, num_queries, num_keys, device=device)


@lru_cache(maxsize=1)
def _compiled() -> Callable[..., Tensor]:
    # uncompiled, it would materialize the full score matrix; dynamic, because lengths change with every batch
    compiled: Callable[..., Tensor] = torch.compile(flex_attention, dynamic=True)
    return compiled


def flex_segment_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scale: float, softcap: float | None
) -> Tensor:
    """query [1, heads, queries, dim], key and value [1, kv heads, rows, dim] -> [1, heads, queries, dim]."""

    def capped(score: Tensor, *_indices: Tensor) -> Tensor:
        return score if softcap is None else softcap * torch.tanh(score / softcap)

    attend = _compiled() if query.device.type == "cuda" else cast("Callable[..., Tensor]", flex_attention)
    out: Tensor = attend(
        query, key, value, score_mod=capped, block_mask=mask, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
    )
    return out
