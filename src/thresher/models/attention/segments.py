"""Segments of a packed row: each attends causally within itself and to all of an optional prefix.

Queries are ordered by segment. If the segments tile the row, the queries are the row; if a layer computes only some
rows, the queries are those rows, and keys and values are still the full row.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from torch import Tensor

from thresher.distributed.context_parallel import ContextParallel

T = TypeVar("T")


@dataclass(frozen=True)
class Segment:
    """Rows start..stop of a packed row; they attend causally within and to all rows of prefix_start..prefix_stop.

    A rejected response is a segment whose prefix is its prompt; prompt and chosen response form one without a prefix.
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
        """Rows that the last row of this segment attends to."""
        return self.prefix_length + self.length

    def tail(self, first: int, stop: int) -> Segment:
        """Return a segment that computes rows first..stop and attends to the same rows."""
        if self.prefix_length or first == self.start:
            # a segment has one prefix, so the rows before `first` cannot become a second one: keep them
            return Segment(self.start, stop, self.prefix_start, self.prefix_stop)
        return Segment(first, stop, self.start, first)


@dataclass(frozen=True)
class PackedAttention:
    """The segments as one opaque object: on a bare tuple, torch.compile would guard, and recompile for every length."""

    segments: tuple[Segment, ...]
    exchange: ContextParallel | None = None  # the all-to-all of context parallelism
    uses_varlen: bool = False  # flash kernels, even on a GPU
    _made: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def cached(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the segments in the form that a kernel reads, made once per micro-batch."""
        # of this micro-batch: a pipeline stage has many in flight, and its backward may compute a forward again
        if key not in self._made:
            self._made[key] = make()
        return cast("T", self._made[key])


@dataclass(frozen=True)
class KeptRows:
    """The rows that the last layer computes, and the segments that they form."""

    rows: Tensor
    visibility: PackedAttention


def query_slices(segments: tuple[Segment, ...]) -> Iterator[tuple[Segment, slice]]:
    """Yield each segment with the slice of its queries."""
    start = 0
    for segment in segments:
        yield segment, slice(start, start + segment.length)
        start += segment.length
