"""Send signals to Ray workers during a run."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

from tests.support.processes import descendants


class Killer:
    """A console that sends a worker a signal when a step is logged for the first time."""

    name = "console"

    def __init__(self, step: int, worker: str, number: int = signal.SIGKILL):
        self._step, self._worker, self._number, self.killed = step, worker, number, 0

    def start(self, run: object, resume_step: int | None) -> None:
        pass

    def log(self, step: int, metrics: object) -> None:  # noqa: ARG002
        if step == self._step and not self.killed:
            victims = workers_named(self._worker)
            self.killed, self.time = victims[-1], time.time()
            os.kill(self.killed, self._number)

    def close(self, status: str) -> None:
        pass

    def print(self, message: str) -> None:
        pass


def workers_named(name: str) -> list[int]:
    """Descendant processes that are Ray actors of a class; Ray sets the class as the process title."""
    title = f"ray::{name}".encode()
    found: list[int] = []
    for pid in descendants(os.getpid()):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(title):
                found.append(pid)
    return found
