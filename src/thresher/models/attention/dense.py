"""Attention by the formula, with the whole mask: for soft-capped scores and windows, and to check the fast paths."""

from __future__ import annotations

import torch
from torch import Tensor

from thresher.models.attention.segments import Segment, visibility


def dense_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: tuple[Segment, ...],
    scale: float,
    *,
    softcap: float | None = None,
    window: int | None = None,
) -> Tensor:
    """query [1, heads, queries, dim], key and value [1, kv heads, rows, dim] -> [1, heads, queries, dim]."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = (query @ key.transpose(2, 3)) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    mask = visibility(segments, key.shape[2], window).to(query.device)
    weights = scores.float().masked_fill(~mask, -torch.inf).softmax(-1).to(value.dtype)
    return weights @ value
