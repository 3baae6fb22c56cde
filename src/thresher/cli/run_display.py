"""The display of a run: its phases and progress, live where the terminal can redraw, as lines elsewhere."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from thresher.cli.library_messages import keep_library_messages
from thresher.cli.terminal import is_live, progress_console, progress_lines
from thresher.observability.details import is_phase
from thresher.observability.trackers.console import ConsoleTracker
from thresher.redact import RedactingFormatter

if TYPE_CHECKING:
    from thresher.builders.data import StoreBuilder


@dataclass(frozen=True)
class RunDisplay:
    """What a run calls to show its metrics, its progress, and the preparation of its pairs."""

    console: ConsoleTracker
    log_progress: Callable[[str, int, int], None] = field(default_factory=progress_lines)

    def show_progress(self, what: str, done: int, total: int) -> None:
        """Show the progress of work other than steps."""
        if not self.console.show_work(what, done, total):
            self.log_progress(what, done, total)

    @property
    def build_store(self) -> StoreBuilder:
        """Build a store and show how far it is."""
        from thresher.cli.prepare import build_and_report

        return partial(build_and_report, show_work=self.console.show_work)


class _Phases(logging.Handler):
    """Show the phase that the run has entered."""

    def __init__(self, console: ConsoleTracker) -> None:
        super().__init__(logging.INFO)
        self.setFormatter(RedactingFormatter())
        self.addFilter(is_phase)
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        self._console.show_work(self.format(record))


@contextmanager
def run_display(log_directory: Path) -> Iterator[RunDisplay]:
    """Show a run until the block ends, and keep the messages of libraries in its logs."""
    console, package = ConsoleTracker(progress_console(), is_live=is_live()), logging.getLogger("thresher")
    phases = _Phases(console)
    with keep_library_messages(log_directory), console.displayed():
        package.addHandler(phases)
        try:
            yield RunDisplay(console)
        finally:
            package.removeHandler(phases)
