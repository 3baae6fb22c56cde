"""Reference attention, one segment at a time: for soft-capped scores and sliding windows, and to check the kernels."""

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

    Memory is the sum of length * context_length over segments, not queries * rows.
    """
    # split and cat, not slices: the gradient of a slice is a zero-filled tensor of the full row, that of a split is one
    # cat
    keys, values = _SplitRows(key, segments), _SplitRows(value, segments)
    queries = query.split([segment.length for segment in segments], dim=2)
    outputs = [
        _attend(segment_query, keys.visible_to(segment), values.visible_to(segment), scale, softcap, window)
        for segment, segment_query in zip(segments, queries, strict=True)
    ]
    return torch.cat(outputs, dim=2)


class _SplitRows:
    """Keys or values, split at every segment and prefix boundary."""

    def __init__(self, rows: Tensor, segments: tuple[Segment, ...]) -> None:
        cuts = {0, rows.shape[2]}
        for segment in segments:
            cuts |= {segment.start, segment.stop}
            if segment.prefix_length:
                cuts |= {segment.prefix_start, segment.prefix_stop}
        edges = sorted(cuts)
        self._index_of = {edge: index for index, edge in enumerate(edges)}
        self._pieces: tuple[Tensor, ...] = rows.split([stop - start for start, stop in pairwise(edges)], dim=2)

    def visible_to(self, segment: Segment) -> Tensor:
        """Concatenate the rows of a segment's prefix and of the segment: the order of their positions."""
        pieces = self._between(segment.start, segment.stop)
        if segment.prefix_length:
            pieces = self._between(segment.prefix_start, segment.prefix_stop) + pieces
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=2)

    def _between(self, start: int, stop: int) -> tuple[Tensor, ...]:
        return self._pieces[self._index_of[start] : self._index_of[stop]]


def _attend(
    query: Tensor, key: Tensor, value: Tensor, scale: float, softcap: float | None, window: int | None
) -> Tensor:
    """Attend from the last `length` positions to all `context` positions.

    query [1, heads, length, dim], key and value [1, kv heads, context, dim] -> [1, heads, length, value dim].
    """
    (_, heads, length, _), (_, kv_heads, context, _) = query.shape, key.shape
    groups = heads // kv_heads
    # query heads of one key/value head are consecutive, so they become rows of one matrix and no key is repeated
    scores = (query.reshape(1, kv_heads, groups * length, -1) @ key.transpose(2, 3)) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.view(1, kv_heads, groups, length, context).masked_fill(
        ~_causal_window_mask(length, context, window, query.device), -torch.inf
    )
    # fp32 or wider: bf16 loses too much precision in a sum over many keys
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(value.dtype)
    out = weights.view(1, kv_heads, groups * length, context) @ value
    return out.view(1, heads, length, value.shape[-1])


def _causal_window_mask(length: int, context: int, window: int | None, device: torch.device) -> Tensor:
    """[length, context] bool: True for the same and earlier positions, at most `window` - 1 back."""
    distance = torch.arange(context - length, context, device=device)[:, None] - torch.arange(context, device=device)
    visible = distance >= 0
    return visible if window is None else visible & (distance < window)
