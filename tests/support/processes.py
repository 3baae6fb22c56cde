"""Processes of a test, by /proc: descendants and stopping."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path


def descendants(pid: int) -> list[int]:
    """Return a process and all its descendants; the children of a thread that ends meanwhile are left out."""
    direct: list[int] = []
    for thread in threads(pid):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            direct += map(int, (thread / "children").read_text().split())
    return [pid, *(each for child in direct for each in descendants(child))]


def stop(pid: int) -> None:
    """Send SIGSTOP and wait until no thread runs: one in a system call finishes that first."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + 60
    while any((thread / "stat").read_text().rpartition(")")[2].split()[0] != "T" for thread in threads(pid)):
        assert time.monotonic() < deadline, f"process {pid} was not stopped within 60 seconds"
        time.sleep(0.01)


def threads(pid: int) -> list[Path]:
    try:
        return list(Path(f"/proc/{pid}/task").iterdir())
    except (FileNotFoundError, ProcessLookupError):
        return []
