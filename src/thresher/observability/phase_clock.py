"""PhaseClock: how long each part of a restart takes, for the record of a recovery."""

from __future__ import annotations

import time
from collections.abc import Callable


class PhaseClock:
    """Seconds by phase since the last failure, in order. A phase starts where the previous one ended.

    started_at: in seconds since the epoch.
    """

    def __init__(self, now: Callable[[], float] = time.time):
        self._now = now
        self.restart()

    def restart(self) -> None:
        """Begin a new measurement."""
        self.started_at = self._ended_at = self._now()
        self.seconds: dict[str, float] = {}

    def end(self, phase: str, of_which: tuple[str, float] | None = None) -> None:
        """End a phase. of_which: a part of it that is recorded under another name, and its seconds."""
        now = self._now()
        elapsed, self._ended_at = now - self._ended_at, now
        if of_which is not None:
            part = min(of_which[1], elapsed)
            self._add(of_which[0], part)
            elapsed -= part
        self._add(phase, elapsed)

    def _add(self, phase: str, seconds: float) -> None:
        self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds
