"""Time: throughput of training, including the cost of the reference, and how long each part of a restart takes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

# spans that a worker keeps, the newest
NUM_SPANS = 4096


class TraceSpan(NamedTuple):
    """Time spent on a step (counted from 0), in seconds since the epoch, which is comparable across processes."""

    work: str
    step: int
    start: float
    stop: float


class ThroughputMeter:
    """Rates since the last log. They exclude evaluation and saving, and include the cost of the reference."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self._started = time.perf_counter()
        self._pairs = self._useful_tokens = self._steps = 0
        self._waited = 0.0

    def record_step(self, pairs: int, useful_tokens: int) -> None:
        """Count a completed step."""
        self._pairs += pairs
        self._useful_tokens += useful_tokens
        self._steps += 1

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time of the block."""
        since = time.perf_counter()
        try:
            yield
        finally:
            self._started += time.perf_counter() - since

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Time a block in which a step waits for the reference."""
        since = time.perf_counter()
        try:
            yield
        finally:
            self._waited += time.perf_counter() - since

    def pop_rates(self, reference_seconds_per_pair: float | None) -> dict[str, float]:
        """Return the rates and restart; precomputed reference logps are charged to the pairs that use them."""
        training = time.perf_counter() - self._started
        seconds = training + (reference_seconds_per_pair or 0.0) * self._pairs
        rates = {
            "pairs_per_second": self._pairs / seconds,
            "useful_tokens_per_second": self._useful_tokens / seconds,
            "time/step": training / max(1, self._steps),
        }
        if reference_seconds_per_pair is not None:
            rates["time/wait_reference"] = self._waited / max(1, self._steps)
        self.restart()
        return rates


class PhaseClock:
    """Seconds by phase since the last failure, in order. A phase starts where the previous one ended."""

    def __init__(self, now: Callable[[], float] = time.time):
        self._now = now
        self.restart()

    def restart(self) -> None:
        """Begin a new measurement."""
        self.started_at = self._ended_at = self._now()  # in seconds since the epoch
        self.seconds: dict[str, float] = {}

    def end(self, phase: str, of_which: tuple[str, float] | None = None) -> None:
        """End a phase; a part of it may be recorded under a different name, given with its seconds."""
        now = self._now()
        elapsed, self._ended_at = now - self._ended_at, now
        if of_which is not None:
            part = min(of_which[1], elapsed)
            self._add(of_which[0], part)
            elapsed -= part
        self._add(phase, elapsed)

    def _add(self, phase: str, seconds: float) -> None:
        self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds
