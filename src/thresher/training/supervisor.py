"""Restart a run after worker failures, resuming from the newest valid checkpoint.

The runtime ends all workers of an attempt after the first failure; the supervisor decides whether to start another.
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
_MAX_WAIT_SECONDS = 60.0


@dataclass(frozen=True)
class Failure:
    """Cause and time of a failure, and the last step logged before it."""

    cause: str
    time: float
    step: int


class Supervisor:
    """Runs attempts until one succeeds or `max_restarts` restarts in a row brought no new checkpoint.

    recovery_log gets one line per failure, once the run logs a step again: cause, last step before the failure, step
    resumed from, steps repeated, and seconds until then.

    resume_step is how the current attempt opens the metric log: None starts a new log, a step keeps the records up to
    that step, and START_OVER keeps none (no checkpoint yet, but an earlier attempt of this run wrote to the log).
    """

    def __init__(
        self,
        max_restarts: int,
        latest_checkpoint: Callable[[], Path | None],
        recovery_log: Path,
        sleep: Callable[[float], None] = time.sleep,
    ):
        self._max_restarts = max_restarts
        self._latest_checkpoint = latest_checkpoint
        self._recovery_log = recovery_log
        self._sleep = sleep
        self._start_step = 0
        self._last_step = 0
        self._log_opened = False
        self._pending: list[Failure] = []  # failures after which no step has been logged yet
        self.resume_step: int | None = None

    def run(self, attempt: Callable[[Supervisor, Path | None], T], checkpoint: Path | None) -> T:
        """Call attempt(self, checkpoint) until it returns; errors that a restart cannot fix are raised."""
        initial = checkpoint
        self._start_from(checkpoint)
        initial_step, consecutive_failures = self._start_step, 0
        while True:
            try:
                return attempt(self, checkpoint)
            except (WorkerLostError, WorkerError, ResourceError, RescaleRequested) as error:
                if isinstance(error, ResourceError) and not (self._log_opened or consecutive_failures):
                    raise  # the cluster never had the requested resources
                self._pending.append(Failure(_first_line(error), time.time(), self._last_step))
                previous_start = self._start_step
                checkpoint = self._select_checkpoint(initial, initial_step)
                self._start_from(checkpoint)
                if not isinstance(error, RescaleRequested):
                    consecutive_failures = 1 if self._start_step > previous_start else consecutive_failures + 1
                    if consecutive_failures > self._max_restarts:
                        raise
                self._announce_restart(checkpoint, error, consecutive_failures)

    def _select_checkpoint(self, initial: Path | None, initial_step: int) -> Path | None:
        """The newest checkpoint of this run, or the initial one (maybe of another run) until there is a later one."""
        latest = self._latest_checkpoint()
        if initial is None or (latest is not None and read_manifest(latest).step >= initial_step):
            return latest
        try:
            verify(initial)
        except CheckpointError:
            return latest
        return initial

    def _start_from(self, checkpoint: Path | None) -> None:
        if checkpoint is None:
            self._start_step = 0
            self.resume_step = START_OVER if self._log_opened else None
        else:
            self._start_step = self.resume_step = read_manifest(checkpoint).step
        self._last_step = self._start_step

    def track_progress(self, log: MetricLogger) -> MetricLogger:
        """Wrap the metric log of the attempt, which must be open, to follow the steps of the run."""
        self._log_opened = True
        return _ProgressLogger(log, self._on_step)

    def _announce_restart(self, checkpoint: Path | None, error: Exception, attempt: int) -> None:
        start = "from scratch" if checkpoint is None else f"from {checkpoint}"
        if isinstance(error, RescaleRequested):
            logger.info("%s; restarting %s to use them", error, start)
            return
        seconds = min(_MAX_WAIT_SECONDS, 2.0 ** (attempt - 1))
        logger.warning(
            "%s; restarting %s in %.0f s (attempt %d/%d since the last new checkpoint)",
            _first_line(error),
            start,
            seconds,
            attempt,
            self._max_restarts,
        )
        self._sleep(seconds)

    def _on_step(self, step: int) -> None:
        self._last_step = step
        failures, self._pending = self._pending, []
        for failure in failures:
            self._record_recovery(failure, step)

    def _record_recovery(self, failure: Failure, step: int) -> None:
        seconds = time.time() - failure.time
        record = {
            "cause": failure.cause,
            "step": failure.step,
            "from_step": self._start_step,
            "steps_repeated": max(0, failure.step - self._start_step),
            "seconds": round(seconds, 3),
        }
        try:
            self._recovery_log.parent.mkdir(parents=True, exist_ok=True)
            with self._recovery_log.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
        except OSError as error:  # the run itself has recovered
            logger.warning("could not write %s: %s", self._recovery_log, error.strerror or error)
        logger.info("recovered at step %d after %.0f s; %d steps repeated", step, seconds, record["steps_repeated"])


@dataclass(frozen=True)
class _ProgressLogger:
    inner: MetricLogger
    on_step: Callable[[int], None]

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.inner.log(step, metrics)
        self.on_step(step)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
