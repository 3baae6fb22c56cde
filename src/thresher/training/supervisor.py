"""Restart a run after worker failures, resuming from the newest valid checkpoint.

The runtime ends all workers of an attempt after the first failure; the supervisor decides whether to start another.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from thresher.checkpoint.manager import READ_BY_DRIVER, DamagedCheckpoints
from thresher.checkpoint.manifest import read_manifest, verify
from thresher.errors import CheckpointError, RescaleRequested, ResourceError, WorkerError, WorkerLostError
from thresher.observability.details import DETAIL
from thresher.observability.timing import PhaseClock
from thresher.observability.trackers.tracker import START_OVER
from thresher.training.loop import MetricLogger

logger = logging.getLogger(__name__)

T = TypeVar("T")
_MAX_WAIT_SECONDS = 60.0


@dataclass(frozen=True)
class Failure:
    """Cause and time of a failure, and the last step logged before it."""

    cause: str
    time: float
    step: int


@dataclass
class Supervisor:
    """Runs attempts until one succeeds or `max_restarts` restarts in a row brought no new checkpoint.

    recovery_log gets one line per failure, once the run logs a step again: cause, last step before the failure, step
    resumed from, steps repeated, and seconds until then. The line of the last failure has the seconds by phase, which
    `clock` has measured since the failure.
    """

    max_restarts: int
    latest_checkpoint: Callable[[], Path | None]
    recovery_log: Path
    sleep: Callable[[float], None] = time.sleep
    damaged: DamagedCheckpoints = field(default_factory=DamagedCheckpoints)  # checkpoints that the ranks have rejected
    clock: PhaseClock = field(default_factory=PhaseClock)
    # how the current attempt opens the metric log: None starts a new log, a step keeps the records up to that step, and
    # START_OVER keeps none (no checkpoint yet, but an earlier attempt of this run wrote to the log)
    resume_step: int | None = None
    _initial: Path | None = None
    _initial_step: int = 0
    _find_initial: Callable[[], Path | None] | None = None  # for the first attempt; None after it
    _start_step: int = 0
    _last_step: int = 0
    _metrics: MetricLogger | None = None  # of the current attempt; None until the log was opened once
    _start_up_error: str | None = None  # of the last attempt, if a worker raised it before the first step
    _pending: list[Failure] = field(default_factory=list)  # failures after which no step has been logged yet

    def run(
        self,
        attempt: Callable[[Supervisor, Path | None], T],
        checkpoint: Path | None,
        find_initial: Callable[[], Path | None] | None = None,
    ) -> T:
        """Call attempt(self, checkpoint) until it returns; errors that a restart cannot fix are raised."""
        self._find_initial = find_initial or self.latest_checkpoint
        self._start_first(checkpoint)
        consecutive_failures = 0
        while True:
            try:
                return attempt(self, checkpoint)
            except (WorkerLostError, WorkerError, ResourceError, RescaleRequested) as error:
                if isinstance(error, ResourceError) and self._metrics is None and not consecutive_failures:
                    raise  # the cluster never had the requested resources
                if self._repeats(error):
                    raise  # as it would at every restart
                self.clock.end("stop")
                self._pending.append(Failure(_first_line(error), self.clock.started_at, self._last_step))
                previous_start = self._start_step
                self._find_initial = None
                checkpoint = self._select_checkpoint()
                self._start_from(checkpoint)
                self.clock.end("verification")
                if not isinstance(error, RescaleRequested):
                    consecutive_failures = 1 if self._start_step > previous_start else consecutive_failures + 1
                    if consecutive_failures > self.max_restarts:
                        raise
                self._announce_restart(checkpoint, error, consecutive_failures)

    def _repeats(self, error: Exception) -> bool:
        """Whether a worker raised the same exception in two attempts in a row, each before its first step."""
        before, self._start_up_error = self._start_up_error, None
        if isinstance(error, WorkerError) and self._last_step == self._start_step:
            self._start_up_error = _first_line(error).partition(" failed: ")[2]  # any rank may be the first to fail
        return before is not None and before == self._start_up_error

    def fall_back(self) -> Path | None:
        """Choose a different checkpoint for the current attempt, whose ranks have found that its own is damaged."""
        if self._find_initial is None:
            checkpoint = self._select_checkpoint()
            self._start_from(checkpoint)
        else:
            checkpoint = self._find_initial()
            self._start_first(checkpoint)
        return checkpoint

    def _select_checkpoint(self) -> Path | None:
        """The newest checkpoint of this run, or the initial one (maybe of another run) until there is a later one."""
        latest, initial = self.latest_checkpoint(), self._initial
        if initial is None or (latest is not None and read_manifest(latest).step >= self._initial_step):
            return latest
        try:
            verify(initial, digests=READ_BY_DRIVER)
        except CheckpointError:
            return latest
        return initial if self.damaged.find(initial) is None else latest

    def _start_first(self, checkpoint: Path | None) -> None:
        self._start_from(checkpoint)
        self._initial, self._initial_step = checkpoint, self._start_step

    def _start_from(self, checkpoint: Path | None) -> None:
        if checkpoint is None:
            self._start_step = 0
            self.resume_step = None if self._metrics is None else START_OVER
        else:
            self._start_step = self.resume_step = read_manifest(checkpoint).step
        self._last_step = self._start_step

    def track_progress(self, log: MetricLogger) -> MetricLogger:
        """Wrap the metric log of the attempt, which must be open, to follow the steps of the run."""
        self._metrics = log
        return self

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of a step, and recoveries that it completes."""
        if self._metrics is not None:
            self._metrics.log(step, metrics)
        self._last_step = step
        failures, self._pending = self._pending, []
        if failures:
            self.clock.end("first step")
        for failure in failures:
            self._record_recovery(failure, step, self.clock.seconds if failure is failures[-1] else {})

    def _announce_restart(self, checkpoint: Path | None, error: Exception, attempt: int) -> None:
        start = "from scratch" if checkpoint is None else f"from {checkpoint}"
        if isinstance(error, RescaleRequested):
            logger.info("%s; restarting %s to use them", error, start)
            return
        # the first restart is at once; what fails again may need time
        seconds = min(_MAX_WAIT_SECONDS, 2.0 ** (attempt - 1)) if attempt > 1 else 0.0
        logger.warning(
            "%s; restarting %s%s (attempt %d/%d since the last new checkpoint)",
            _first_line(error),
            start,
            f" in {seconds:.0f} s" if seconds else "",
            attempt,
            self.max_restarts,
        )
        self.sleep(seconds)
        self.clock.end("wait")

    def _record_recovery(self, failure: Failure, step: int, phases: Mapping[str, float]) -> None:
        seconds = time.time() - failure.time
        record = {
            "time": round(failure.time, 3),
            "cause": failure.cause,
            "step": failure.step,
            "from_step": self._start_step,
            "steps_repeated": max(0, failure.step - self._start_step),
            "seconds": round(seconds, 3),
            "phases": {phase: round(each, 3) for phase, each in phases.items()},
        }
        try:
            self.recovery_log.parent.mkdir(parents=True, exist_ok=True)
            with self.recovery_log.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
        except OSError as error:  # the run itself has recovered
            logger.warning("could not write %s: %s", self.recovery_log, error.strerror or error)
        parts = ", ".join(f"{phase} {each:.1f}" for phase, each in phases.items())
        logger.info("recovered at step %d after %.0f s; %d steps repeated", step, seconds, record["steps_repeated"])
        logger.info("seconds of the recovery: %s", parts, extra=DETAIL)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
