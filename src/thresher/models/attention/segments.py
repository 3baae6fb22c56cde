"""Who sees whom in a packed row: runs of rows that are causal within, and see a common prefix whole.

Queries stand segment after segment. Where the segments tile the row, that is the row itself; where a layer computes
only some rows, its queries are those rows alone, and keys and values are still the whole row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class UlyssesExchange(Protocol):
    """Trade a part of the row with all heads for the whole row with a part of the heads."""

    def gather_sequence(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[1, heads, part of the rows, dim] each -> [1, part of the heads, rows, dim] each."""
        ...

    def scatter_sequence(self, attended: Tensor) -> Tensor:
        """[1, part of the heads, rows, dim] -> [1, heads, part of the rows, dim]."""
        ...


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
    def length(self) -> int:
        return self.stop - self.start

    @property
    def prefix_length(self) -> int:
        return self.prefix_stop - self.prefix_start

    @property
    def context_length(self) -> int:
        """Rows that the last row of this segment sees."""
        return self.prefix_length + self.length

    def tail(self, first: int, stop: int) -> Segment:
        """The rows first..stop of this segment as one of its own, which sees what they saw."""
        if self.prefix_length or first == self.start:
            # a prefix and earlier rows of its own would be two places to see: keep the segment from its start
            return Segment(self.start, stop, self.prefix_start, self.prefix_stop)
        return Segment(first, stop, self.start, first)


@dataclass(frozen=True)
class PackedAttention:
    """The segments as one object, which compiled layers hand on without looking inside.

    Of a bare tuple they would note the length, and be compiled again for every number of pairs. Where the row is split
    over processes, exchange brings every process the whole row of some heads, and back.
    """

    segments: tuple[Segment, ...]
    exchange: UlyssesExchange | None = None


@dataclass(frozen=True)
class KeptRows:
    """The rows that a last layer need compute: rows of the packed row, and the segments that they form."""

    rows: Tensor
    visibility: PackedAttention


def query_slices(segments: tuple[Segment, ...]) -> Iterator[tuple[Segment, slice]]:
    """Each segment with the place of its queries."""
    place = 0
    for segment in segments:
        yield segment, slice(place, place + segment.length)
        place += segment.length
