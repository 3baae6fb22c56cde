"""What this process is doing, for whoever waits for it: should it hang, its last words are told."""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Heartbeat:
    """The last thing that a process began, and when, in seconds since the epoch."""

    activity: str
    started_at: float
    process: int


_last = Heartbeat("starting", time.time(), os.getpid())


def set_activity(what: str) -> None:
    """Say what begins now."""
    global _last  # a process does one thing at a time, and has one pulse
    _last = Heartbeat(what, time.time(), os.getpid())
    logger.debug("%s", what)


def heartbeat() -> Heartbeat:
    """The last thing that was said here."""
    return _last
