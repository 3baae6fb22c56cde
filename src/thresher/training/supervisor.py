"""Bring a run to its end though parts of it die: every attempt goes on from the newest checkpoint that verifies.

The first failure ends the whole group of workers (see `runtime`); here it is decided whether to build it again.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from thresher.checkpoint.manifest import read_manifest, verify
from thresher.errors import CheckpointError, RescaleRequested, ResourceError, WorkerError, WorkerLostError
from thresher.observability.trackers.tracker import START_OVER
from thresher.training.loop import MetricLogger

logger = logging.getLogger(__name__)

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
        sleep: Callable[[float], None] = time.sleep,
    ):
        self._max_restarts = max_restarts
        self._newest = newest
        self._record = record
        self._sleep = sleep
        self._reached = 0
        self._failures: list[Failure] = []  # those since which the run has not been back at a step
        self._resumed_step = 0
        self._resume_step: int | None = None
        self._has_begun = False

    @property
    def resume_step(self) -> int | None:
        """The last step whose records stay in the log, or START_OVER; None where this run has no log yet."""
        return self._resume_step

    def run(self, attempt: Callable[[Supervisor, Path | None], T], checkpoint: Path | None) -> T:
        """Call attempt(self, checkpoint) until one ends; a mistake that a person must mend ends it as well."""
        given = checkpoint
        self._stand_at(checkpoint)
        self._resume_step = None if checkpoint is None else self._resumed_step
        first_step, in_a_row = self._resumed_step, 0
        while True:
            try:
                return attempt(self, checkpoint)
            except (WorkerLostError, WorkerError, ResourceError, RescaleRequested) as error:
                if isinstance(error, ResourceError) and not (self._has_begun or in_a_row):
                    raise  # nothing was lost: the config asks for what was never there
                self._failures.append(Failure(_first_line(error), time.time(), self._reached))
                before = self._resumed_step
                checkpoint = self._go_back_to(given, first_step)
                self._stand_at(checkpoint)
                if not isinstance(error, RescaleRequested):
                    in_a_row = 1 if self._resumed_step > before else in_a_row + 1
                    if in_a_row > self._max_restarts:
                        raise
                if checkpoint is not None:
                    self._resume_step = self._resumed_step
                elif self._has_begun:
                    self._resume_step = START_OVER
                self._go_on(checkpoint, error, in_a_row)

    def _go_back_to(self, given: Path | None, first_step: int) -> Path | None:
        """The newest of our own; one of another run, if it was given, until there is a later one of our own."""
        newest = self._newest()
        if given is None or (newest is not None and read_manifest(newest).step >= first_step):
            return newest
        try:
            verify(given)
        except CheckpointError:
            return newest
        return given

    def _stand_at(self, checkpoint: Path | None) -> None:
        self._reached = self._resumed_step = 0 if checkpoint is None else read_manifest(checkpoint).step

    def track_progress(self, log: MetricLogger) -> MetricLogger:
        """A log that tells us how far the run is; it is open, so that what it holds is of this run."""
        self._has_begun = True
        return _WatchedLog(log, self._reach)

    def _go_on(self, checkpoint: Path | None, error: Exception, in_a_row: int) -> None:
        where = "from the start" if checkpoint is None else f"from {checkpoint}"
        if isinstance(error, RescaleRequested):
            logger.info("%s; the run goes on %s with them", error, where)
            return
        seconds = min(_LONGEST_WAIT, 2.0 ** (in_a_row - 1))
        logger.warning(
            "%s; the run goes on %s in %.0f s (restart %d of at most %d without a new checkpoint)",
            _first_line(error),
            where,
            seconds,
            in_a_row,
            self._max_restarts,
        )
        self._sleep(seconds)

    def _reach(self, step: int) -> None:
        self._reached = step
        failures, self._failures = self._failures, []
        for failure in failures:
            self._note(failure, step)

    def _note(self, failure: Failure, step: int) -> None:
        seconds = time.time() - failure.time
        line = {
            "cause": failure.cause,
            "step": failure.step,
            "from_step": self._resumed_step,
            "steps_repeated": max(0, failure.step - self._resumed_step),
            "seconds": round(seconds, 3),
        }
        try:
            self._record.parent.mkdir(parents=True, exist_ok=True)
            with self._record.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:  # no reason to end a run that is back
            logger.warning("could not note the recovery in %s: %s", self._record, error.strerror or error)
        logger.info("back at step %d after %.0f s; %d steps are repeated", step, seconds, line["steps_repeated"])


@dataclass(frozen=True)
class _WatchedLog:
    log_to: MetricLogger
    reach: Callable[[int], None]

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.log_to.log(step, metrics)
        self.reach(step)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
