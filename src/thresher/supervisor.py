"""Bring a run to its end though parts of it die: every attempt goes on from the newest checkpoint that verifies.

The first failure ends the whole group of workers (see `runtime`); here it is decided whether to build it again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from thresher.checkpoint.manifest import read_manifest
from thresher.errors import LostError, WorkerError
from thresher.loop import MetricLog

T = TypeVar("T")
_LONGEST_WAIT = 60.0


@dataclass(frozen=True)
class Failure:
    """What went wrong, when, and how far the log was."""

    cause: str
    time: float
    step: int


class Supervisor:
    """Count failures that follow one another without a new checkpoint, and give up after `max_restarts` of them.

    Each recovery is a line in `record`: cause, the step that was reached, the step gone on from, and the seconds until
    the run was back at its first new step.
    """

    def __init__(
        self,
        max_restarts: int,
        newest: Callable[[], Path | None],
        record: Path,
        announce: Callable[[str], None],
        sleep: Callable[[float], None] = time.sleep,
    ):
        self._max_restarts = max_restarts
        self._newest = newest
        self._record = record
        self._announce = announce
        self._sleep = sleep
        self._reached = 0
        self._failure: Failure | None = None
        self._resumed_step = 0
        self._resume_step: int | None = None

    @property
    def resume_step(self) -> int | None:
        """The last step whose records stay in the log; None where this run has none yet."""
        return self._resume_step

    def run(self, attempt: Callable[[Supervisor, Path | None], T], checkpoint: Path | None) -> T:
        """Call attempt(self, checkpoint) until one ends; a mistake that a person must mend ends it as well."""
        self._stand_at(checkpoint)
        self._resume_step = None if checkpoint is None else self._resumed_step
        failures = 0
        while True:
            try:
                return attempt(self, checkpoint)
            except (LostError, WorkerError) as error:
                self._failure = Failure(_first_line(error), time.time(), self._reached)
                before = self._resumed_step
                checkpoint = self._newest()
                self._stand_at(checkpoint)
                failures = 1 if self._resumed_step > before else failures + 1
                if failures > self._max_restarts:
                    raise
                # started over, the log keeps nothing, not even what was measured before the first step
                self._resume_step = -1 if checkpoint is None else self._resumed_step
                self._wait(checkpoint, failures)

    def _stand_at(self, checkpoint: Path | None) -> None:
        self._reached = self._resumed_step = 0 if checkpoint is None else read_manifest(checkpoint).step

    def watching(self, log: MetricLog) -> MetricLog:
        """A log that tells us how far the run is."""
        return _WatchedLog(log, self._reach)

    def _wait(self, checkpoint: Path | None, failures: int) -> None:
        assert self._failure is not None  # noqa: S101
        seconds = min(_LONGEST_WAIT, 2.0 ** (failures - 1))
        where = "from the start" if checkpoint is None else f"from {checkpoint}"
        self._announce(
            f"{self._failure.cause}; the run goes on {where} in {seconds:.0f} s (restart {failures} of at most "
            f"{self._max_restarts} without a new checkpoint)"
        )
        self._sleep(seconds)

    def _reach(self, step: int) -> None:
        self._reached = step
        failure, self._failure = self._failure, None
        if failure is None:
            return
        seconds = time.time() - failure.time
        line = {
            "cause": failure.cause,
            "step": failure.step,
            "from_step": self._resumed_step,
            "steps_repeated": failure.step - self._resumed_step,
            "seconds": round(seconds, 3),
        }
        self._record.parent.mkdir(parents=True, exist_ok=True)
        with self._record.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        self._announce(f"back at step {step} after {seconds:.0f} s; {line['steps_repeated']} steps are repeated")


@dataclass(frozen=True)
class _WatchedLog:
    log_to: MetricLog
    reach: Callable[[int], None]

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.log_to.log(step, metrics)
        self.reach(step)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
