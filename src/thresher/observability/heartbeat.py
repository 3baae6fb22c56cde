"""Process heartbeat: the current activity and a count of finished operations, by which a worker that hangs is found."""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass, replace
from typing import Literal

logger = logging.getLogger(__name__)

# steady: operations finish one after another. warm-up: the same, but the first ones may compile and connect.
# unknown: loading, saving, waiting for a call, and all else that may take any time
Pace = Literal["unknown", "warm-up", "steady"]
NUM_WARM_UP_OPERATIONS = 2


@dataclass(frozen=True)
class Heartbeat:
    """The activity that a process started last."""

    activity: str
    started_at: float  # seconds since the epoch
    process: int
    progress: int = 0  # operations that the process has finished, such as micro-batches
    pace: Pace = "unknown"


_last = Heartbeat("starting", time.time(), os.getpid())


def set_activity(activity: str, pace: Pace = "unknown") -> None:
    """Record the activity that starts now."""
    global _last  # one per process, because a process has one activity at a time
    _last = Heartbeat(activity, time.time(), os.getpid(), _last.progress + 1, pace)
    logger.debug("%s", activity)


def report_progress() -> None:
    """Record that an operation of the current activity has finished."""
    global _last
    _last = replace(_last, progress=_last.progress + 1)


def end_activity() -> None:
    """Record that the process waits for its next call; the last activity remains known."""
    global _last
    _last = replace(_last, pace="unknown")


def pace_after(num_operations: int) -> Pace:
    """Return the pace of an operation after this many of its kind in this process."""
    return "steady" if num_operations >= NUM_WARM_UP_OPERATIONS else "warm-up"


def heartbeat() -> Heartbeat:
    """Return the last heartbeat of this process."""
    return _last
