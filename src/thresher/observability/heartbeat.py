"""Process heartbeat: the current activity, reported when a worker hangs."""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Heartbeat:
    """The activity that a process started last; started_at is in seconds since the epoch."""

    activity: str
    started_at: float
    process: int


_last = Heartbeat("starting", time.time(), os.getpid())


def set_activity(activity: str) -> None:
    """Record the activity that starts now."""
    global _last  # one per process, because a process has one activity at a time
    _last = Heartbeat(activity, time.time(), os.getpid())
    logger.debug("%s", activity)


def heartbeat() -> Heartbeat:
    """Return the last heartbeat of this process."""
    return _last
