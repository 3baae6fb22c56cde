"""FlexAttention over segments, for GPUs: the same visibility as a block mask. Its backward has no CPU kernel."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from thresher.models.attention.segments import Segment


def block_mask(segments: tuple[Segment, ...], num_rows: int, window: int | None, device: torch.device) -> BlockMask:
    """Visibility as a function of (row, column), from four numbers a row."""
    owner = torch.zeros(num_rows, dtype=torch.int32)
    prefix_start = torch.zeros(num_rows, dtype=torch.int32)
    prefix_stop = torch.zeros(num_rows, dtype=torch.int32)
    position = torch.zeros(num_rows, dtype=torch.int32)
    for number, segment in enumerate(segments):
        own = slice(segment.start, segment.stop)
        owner[own] = number
        prefix_start[own], prefix_stop[own] = segment.prefix_start, segment.prefix_stop
        position[own] = torch.arange(segment.stop - segment.start, dtype=torch.int32) + segment.prefix_length
    owner, prefix_start, prefix_stop, position = (
        column.to(device) for column in (owner, prefix_start, prefix_stop, position)
    )

    def sees(_batch: Tensor, _head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        in_prefix = (column >= prefix_start[row]) & (column < prefix_stop[row])
        seen = in_prefix | ((owner[row] == owner[column]) & (column <= row))
        return seen if window is None else seen & (position[row] - position[column] < window)

    return create_block_mask(sees, None, None, num_rows, num_rows, device=device)


@lru_cache(maxsize=1)
def _compiled() -> Callable[..., Tensor]:
    # uncompiled it would hold the whole score matrix; lengths differ from batch to batch, hence dynamic
    compiled: Callable[..., Tensor] = torch.compile(flex_attention, dynamic=True)
    return compiled


def flex_segment_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scale: float, softcap: float | None
) -> Tensor:
    """query [1, heads, rows, dim], key and value [1, kv heads, rows, dim] -> [1, heads, rows, dim]."""

    def capped(score: Tensor, *_indices: Tensor) -> Tensor:
        return score if softcap is None else softcap * torch.tanh(score / softcap)

    attend = _compiled() if query.device.type == "cuda" else cast("Callable[..., Tensor]", flex_attention)
    out: Tensor = attend(
        query, key, value, score_mod=capped, block_mask=mask, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
    )
    return out
