"""Who sees whom in a packed row: runs of rows that are causal within, and see a common prefix whole."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Segment:
    """Rows start..stop of a packed row. They see themselves causally and every row of prefix_start..prefix_stop.

    A rejected response is a segment whose prefix is its prompt; prompt and chosen response are one segment without.
    """

    start: int
    stop: int
    prefix_start: int = 0
    prefix_stop: int = 0

    @property
    def prefix_length(self) -> int:
        return self.prefix_stop - self.prefix_start

    @property
    def context_length(self) -> int:
        """Rows that the last row of this segment sees."""
        return self.prefix_length + self.stop - self.start


def visibility(segments: tuple[Segment, ...], num_rows: int, window: int | None = None) -> Tensor:
    """The whole mask, [num_rows, num_rows] bool: True where the row sees the column. For checks and odd families."""
    visible = torch.zeros(num_rows, num_rows, dtype=torch.bool)
    for segment in segments:
        visible[segment.start : segment.stop] = False
        length = segment.stop - segment.start
        own = torch.ones(length, length, dtype=torch.bool).tril()
        prefix = torch.ones(length, segment.prefix_length, dtype=torch.bool)
        if window is not None:
            # distances are those of positions: a segment goes on where its prefix ends
            own &= torch.ones(length, length, dtype=torch.bool).triu(1 - window)
            rows = torch.arange(length)[:, None] + segment.prefix_length
            prefix &= rows - torch.arange(segment.prefix_length)[None] < window
        visible[segment.start : segment.stop, segment.start : segment.stop] = own
        visible[segment.start : segment.stop, segment.prefix_start : segment.prefix_stop] = prefix
    return visible
