"""What a tracker is, and the fan-out to several of them.

Decides who may fail: the local log must work, because it is the record of the run; any other tracker that
fails after a good configuration is reported once and left out, because a dashboard's outage must not cost a
training run.
"""

import importlib
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, Protocol

from thresher import durable
from thresher.errors import UserError
from thresher.redact import redact, redact_text

logger = logging.getLogger(__name__)

Status = Literal["finished", "failed", "interrupted"]
# the resume_step of a run that starts over and goes on in its own log: no record stays, not even one of step 0
START_OVER = -1


@dataclass(frozen=True)
class RunInfo:
    """What a tracker may know about a run. `run_dir` exists."""

    exp_name: str
    run_dir: Path
    config: Mapping[str, Any]
    total_steps: int
    total_pairs: int


class Tracker(Protocol):
    """Somewhere that metrics go."""

    @property
    def name(self) -> str:
        """The name that a configuration calls it by."""

    def start(self, run: RunInfo, resume_step: int | None) -> None:
        """Begin a new log (None), or go on after `resume_step`: what was logged for later steps is logged again."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics of a step. A step may come in several parts, but steps never go back."""

    def close(self, status: Status) -> None:
        """End, with everything written."""


class Trackers:
    """Several trackers as one. Errors of `required` are raised, errors of `optional` logged once each."""

    name = "trackers"

    def __init__(self, required: Sequence[Tracker], optional: Sequence[Tracker]) -> None:
        self._required = list(required)
        self._optional = list(optional)

    def start(self, run: RunInfo, resume_step: int | None) -> None:
        """Start all; a mistake that a person can mend stops the run here, before any work is done."""
        # Redacted here whatever the caller did: no tracker may ever see a secret.
        run = replace(run, config=redact(run.config))
        with readable_errors():
            run.run_dir.mkdir(parents=True, exist_ok=True)
            refuse_links(run.run_dir)
            for tracker in self._required:
                tracker.start(run, resume_step)
        self._each_optional(lambda tracker: tracker.start(run, resume_step), raise_user_errors=True)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log to all."""
        with readable_errors():
            for tracker in self._required:
                tracker.log(step, metrics)
        self._each_optional(lambda tracker: tracker.log(step, metrics))

    def close(self, status: Status) -> None:
        """Close all, the local log first and also when another one fails."""
        try:
            with readable_errors():
                for tracker in self._required:
                    tracker.close(status)
        finally:
            self._each_optional(lambda tracker: tracker.close(status))

    def _each_optional(self, call: Callable[[Tracker], None], *, raise_user_errors: bool = False) -> None:
        for tracker in list(self._optional):
            try:
                call(tracker)
            except Exception as error:
                if raise_user_errors and isinstance(error, UserError):
                    raise
                self._optional.remove(tracker)
                # A server's address in the error may carry a login, and a record may go to any handler.
                logger.warning(
                    "tracker %s failed and gets no more metrics; the local log has them all (%s)",
                    tracker.name,
                    redact_text(f"{type(error).__name__}: {error}"),
                )


def readable_errors() -> AbstractContextManager[None]:
    """Say what a person can do about a log that cannot be written; without it a run does not go on."""
    return durable.translate_os_errors("could not write the log of the run")


def refuse_links(directory: Path) -> None:
    """A log that is gone on with may come from elsewhere, and would be written to where a link leads."""
    if links := sorted(path for path in directory.iterdir() if path.is_symlink()):
        raise UserError(f"{links[0]} is a link; logs are plain files, so remove it, or set another logging_dir")


def import_tracker_library(module: str, extra: str) -> ModuleType:
    """Import a library that only one tracker needs."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(
            f"tracker {extra} needs a package that is not installed ({error}); "
            f"run `pip install 'thresher[{extra}]'` or leave {extra} out of the trackers"
        ) from error


def rotate(path: Path) -> Path | None:
    """Rename what an earlier run left at `path` to the next free number; None if there was nothing."""
    if not path.exists():
        return None
    number = 1
    while (aside := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    return path.rename(aside)
