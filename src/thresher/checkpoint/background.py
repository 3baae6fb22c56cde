"""Saves in the background: training goes on while a thread writes what was copied.

At most one is under way. A failure is raised at the next chance: the next step, the next save, or the end of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from thresher.checkpoint.keeper import CheckpointKeeper
from thresher.checkpoint.parts import HostCopies, Processes
from thresher.checkpoint.saving import Write


class BackgroundSaver:
    """Give saves to a thread of their own.

    The thread speaks to other processes over `open_line`, made when it is first needed and by all of them: its
    messages must not meet those of training. It is no daemon: a process that ends waits for a save that is under way.
    """

    def __init__(self, keeper: CheckpointKeeper, open_line: Callable[[], Processes]):
        self._keeper = keeper
        self._open_line = open_line
        self._line: Processes | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._under_way: Future[Path] | None = None
        self.copies = HostCopies()

    def begin(self, step: int, write: Write, metrics: Mapping[str, float]) -> None:
        """Start to write; the save before must be over, which `wait` makes sure of."""
        if self._under_way is not None:
            raise RuntimeError("a save is under way; wait for it first")
        self._line = self._line or self._open_line()
        self._thread = self._thread or ThreadPoolExecutor(1, "save")
        self._under_way = self._thread.submit(self._keeper.save, step, write, metrics, self._line)

    def wait(self) -> None:
        """Return when no save is under way; raise its failure."""
        if self._under_way is not None:
            under_way, self._under_way = self._under_way, None
            under_way.result()

    def check(self) -> None:
        """Raise the failure of a save that is over, without waiting for one that is not."""
        if self._under_way is not None and self._under_way.done():
            self.wait()
