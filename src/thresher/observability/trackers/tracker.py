"""The tracker protocol, and the fan-out to several trackers.

An error of the local log ends the run. Any other tracker that fails after start-up is reported once and disabled,
because an outage of a dashboard must not end a training run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from thresher import durable
from thresher.errors import UserError
from thresher.redact import redact, redact_text

logger = logging.getLogger(__name__)

Status = Literal["finished", "failed", "interrupted"]
# the resume_step of a run that restarts from the beginning in its existing log: discard all records, even of step 0
START_OVER = -1


@dataclass(frozen=True)
class RunInfo:
    """Description of a run for trackers."""

    exp_name: str
    run_dir: Path  # exists
    config: Mapping[str, Any]
    total_steps: int
    total_pairs: int
    unit: str = "pairs"  # what the examples are called
    health_from: int | None = None  # the example from which most health rules compare; None with `health: off`


@dataclass(frozen=True)
class Table:
    """Rows of texts and numbers that belong to a step, under a name like a metric's."""

    name: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str | float]]


class Tracker(Protocol):
    """A destination of metrics."""

    @property
    def name(self) -> str:
        """The name used in the configuration."""

    def start(self, run: RunInfo, resume_step: int | None) -> None:
        """Start a new log (None), or continue after `resume_step`: later steps will be logged again."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log metrics of a step. A step may be logged in several calls; steps never decrease."""

    def log_table(self, step: int, table: Table) -> None:
        """Log a table of a step, or nothing where tables cannot be shown."""

    def close(self, status: Status) -> None:
        """Write everything out and close."""


class Trackers:
    """Several trackers as one. Errors of `required` trackers are raised, errors of `optional` ones logged once.

    Args:
        callbacks: The user's code, called last; its errors are raised as they are.
    """

    def __init__(
        self, required: Sequence[Tracker], optional: Sequence[Tracker], callbacks: Tracker | None = None
    ) -> None:
        self._required = list(required)
        self._optional = list(optional)
        self._callbacks = [] if callbacks is None else [callbacks]

    def start(self, run: RunInfo, resume_step: int | None) -> None:
        """Start all trackers; a `UserError` of any tracker is raised, because no work is lost yet."""
        # Redact here, whether or not the caller did: no tracker may see a secret.
        run = replace(run, config=redact(run.config))
        with translate_os_errors():
            run.run_dir.mkdir(parents=True, exist_ok=True)
            refuse_links(run.run_dir)
        self._each(lambda tracker: tracker.start(run, resume_step), raise_user_errors=True)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log to all trackers."""
        self._each(lambda tracker: tracker.log(step, metrics))

    def log_table(self, step: int, table: Table) -> None:
        """Log a table to all trackers but the local log, which has its own files for such rows."""
        self._each_optional(lambda tracker: tracker.log_table(step, table))

    def close(self, status: Status) -> None:
        """Close all trackers, even if the local log fails to close."""
        try:
            with translate_os_errors():
                for tracker in self._required:
                    tracker.close(status)
        finally:
            self._each_optional(lambda tracker: tracker.close(status))
        for tracker in self._callbacks:
            tracker.close(status)

    def _each(self, call: Callable[[Tracker], None], *, raise_user_errors: bool = False) -> None:
        with translate_os_errors():
            for tracker in self._required:
                call(tracker)
        self._each_optional(call, raise_user_errors=raise_user_errors)
        for tracker in self._callbacks:
            call(tracker)

    def _each_optional(self, call: Callable[[Tracker], None], *, raise_user_errors: bool = False) -> None:
        for tracker in list(self._optional):
            try:
                call(tracker)
            except Exception as error:
                if raise_user_errors and isinstance(error, UserError):
                    raise
                self._optional.remove(tracker)
                # The server address in the error may contain a password, and handlers need not redact.
                logger.warning(
                    "tracker %s failed and is disabled; the local log is complete (%s)",
                    tracker.name,
                    redact_text(f"{type(error).__name__}: {error}"),
                )


def translate_os_errors() -> AbstractContextManager[None]:
    """Raise failed writes of the log as errors that say what to do; they end the run."""
    return durable.translate_os_errors("could not write the log of the run")


def refuse_links(directory: Path) -> None:
    """Raise if a log directory contains a symlink: an existing log may come from elsewhere and redirect writes."""
    if links := sorted(path for path in directory.iterdir() if path.is_symlink()):
        raise UserError(
            f"{links[0]} is a symlink, and logs are not written through symlinks; remove it or set a different "
            "logging_dir"
        )


def rotate(path: Path) -> Path | None:
    """Rename a file or directory of an earlier run to the next free number; None if it does not exist."""
    if not path.exists():
        return None
    number = 1
    while (renamed := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    return path.rename(renamed)
