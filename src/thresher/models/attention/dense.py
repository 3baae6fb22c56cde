"""Attention by the formula, a segment at a time: for soft-capped scores and windows, and to check the fast paths."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from thresher.models.attention.segments import Segment


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
    """query [1, heads, queries, dim], key and value [1, kv heads, rows, dim] -> [1, heads, queries, value dim].

    Memory is that of each segment's scores, the sum of length * context_length, not queries * rows.
    """
    # split and cat, never slices: a slice's gradient is as large as the row and filled with zeros, that of a split is
    # one cat
    keys, values = _SplitRows(key, segments), _SplitRows(value, segments)
    queries = query.split([segment.length for segment in segments], dim=2)
    parts = [
        _attend(part, keys.seen_by(segment), values.seen_by(segment), scale, softcap, window)
        for segment, part in zip(segments, queries, strict=True)
    ]
    return torch.cat(parts, dim=2)


class _SplitRows:
    """Keys or values, split wherever some segment or prefix begins or ends."""

    def __init__(self, rows: Tensor, segments: tuple[Segment, ...]) -> None:
        cuts = {0, rows.shape[2]}
        for segment in segments:
            cuts |= {segment.start, segment.stop}
            if segment.prefix_length:
                cuts |= {segment.prefix_start, segment.prefix_stop}
        places = sorted(cuts)
        self._number_at = {place: number for number, place in enumerate(places)}
        self._pieces: tuple[Tensor, ...] = rows.split([stop - start for start, stop in pairwise(places)], dim=2)

    def seen_by(self, segment: Segment) -> Tensor:
        """Join the rows of a segment's prefix, then its own, which is the order of their positions."""
        pieces = self._run(segment.start, segment.stop)
        if segment.prefix_length:
            pieces = self._run(segment.prefix_start, segment.prefix_stop) + pieces
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=2)

    def _run(self, start: int, stop: int) -> tuple[Tensor, ...]:
        return self._pieces[self._number_at[start] : self._number_at[stop]]


def _attend(
    query: Tensor, key: Tensor, value: Tensor, scale: float, softcap: float | None, window: int | None
) -> Tensor:
    """Attend from the last `length` of `context` positions.

    query [1, heads, length, dim], key and value [1, kv heads, context, dim] -> [1, heads, length, value dim].
    """
    (_, heads, length, _), (_, kv_heads, context, _) = query.shape, key.shape
    groups = heads // kv_heads
    # the query heads that share a key head lie one after another, as rows of one matrix: no key is repeated
    scores = (query.reshape(1, kv_heads, groups * length, -1) @ key.transpose(2, 3)) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.view(1, kv_heads, groups, length, context).masked_fill(
        ~_looks_back(length, context, window, query.device), -torch.inf
    )
    # fp32 at least: bf16 holds too few digits for a sum over many keys
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(value.dtype)
    out = weights.view(1, kv_heads, groups * length, context) @ value
    return out.view(1, heads, length, value.shape[-1])


def _looks_back(length: int, context: int, window: int | None, device: torch.device) -> Tensor:
    """[length, context] bool: a row sees its own and earlier positions, no further back than the window."""
    distance = torch.arange(context - length, context, device=device)[:, None] - torch.arange(context, device=device)
    visible = distance >= 0
    return visible if window is None else visible & (distance < window)
