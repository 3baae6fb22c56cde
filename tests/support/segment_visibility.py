"""Which keys each query of a packed row attends to, as a full matrix."""

from __future__ import annotations

import torch

from thresher.models.attention.segments import Segment, query_slices


def visibility(segments: tuple[Segment, ...], num_keys: int, window: int | None = None) -> torch.Tensor:
    """Full mask, [queries, num_keys] bool: True where a query attends to a key. The oracle of the attention tests."""
    visible = torch.zeros(sum(segment.length for segment in segments), num_keys, dtype=torch.bool)
    for segment, queries in query_slices(segments):
        own = torch.ones(segment.length, segment.length, dtype=torch.bool).tril()
        prefix = torch.ones(segment.length, segment.prefix_length, dtype=torch.bool)
        if window is not None:
            # distances are between positions: a segment continues where its prefix ends
            own &= torch.ones(segment.length, segment.length, dtype=torch.bool).triu(1 - window)
            rows = torch.arange(segment.length)[:, None] + segment.prefix_length
            prefix &= rows - torch.arange(segment.prefix_length)[None] < window
        visible[queries, segment.start : segment.stop] = own
        visible[queries, segment.prefix_start : segment.prefix_stop] = prefix
    return visible
