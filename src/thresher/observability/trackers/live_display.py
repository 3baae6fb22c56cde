"""The live display of a run: a few lines at the bottom of a terminal, redrawn in place, with messages above them.

It shows what `ConsoleTracker` passes on and computes nothing but times. Stopping it erases its lines.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

_REFRESHES_PER_SECOND = 4
_BAR_WIDTH = 30


class LiveDisplay:
    """Steps, metrics, the last event and the current work, a line each.

    Before the first step, and between two attempts of a run, the work is all there is to show.
    """

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._work: tuple[str, int, int] | None = None
        self._spinner = Spinner("dots", style="cyan")
        self._steps: tuple[int, int, int] | None = None  # first, completed, total
        self._steps_began = 0.0
        self._metrics = self._event = ""
        self._without_event = "no events"
        self._live = Live(
            console=console,
            get_renderable=self._render,
            refresh_per_second=_REFRESHES_PER_SECOND,
            transient=True,
        )

    def start(self) -> None:
        self._live.start()

    def stop(self) -> None:
        """Erase the display and show the cursor again."""
        self._live.stop()

    def show_work(self, what: str, done: int = 0, total: int = 0) -> None:
        """Show the current work, with its progress if its total is known."""
        self._work = (what, done, total)

    def begin_steps(self, first: int, total: int) -> None:
        """Show the bar from here on; first: steps that were completed before."""
        self._steps, self._steps_began = (first, first, total), self._clock()
        self._metrics, self._work = "", None

    def show_without_event(self, text: str) -> None:
        """Set the line that is shown until there is an event."""
        self._without_event = text

    def show_step(self, step: int, metrics: str) -> None:
        """Show the metrics of a completed step."""
        if self._steps is not None:
            self._steps = (self._steps[0], step, self._steps[2])
        self._metrics, self._work = metrics, None

    def show_event(self, event: str) -> None:
        """Show the last event, such as one of the health rules."""
        self._event = event

    def end_steps(self) -> None:
        """Remove the bar: an attempt of the run has ended."""
        self._steps, self._work = None, None

    def _render(self) -> RenderableType:
        lines: list[RenderableType] = []
        if self._steps is not None:
            lines.append(self._render_steps(*self._steps))
            lines.append(_line(self._metrics or "waiting for the first step"))
        if self._event:
            lines.append(_line(f"last event: {self._event}", "yellow"))
        elif self._steps is not None:
            lines.append(_line(self._without_event, "dim"))
        if self._work is not None:
            lines.append(self._render_work(*self._work))
        return Group(*lines)

    def _render_steps(self, first: int, completed: int, total: int) -> RenderableType:
        elapsed = self._clock() - self._steps_began
        left = seconds_left(elapsed, completed - first, total - completed)
        times = f"{format_seconds(elapsed)} elapsed, {left} left"
        bar = ProgressBar(total=max(1, total), completed=completed, width=_BAR_WIDTH)
        return _row(_line(f"step {completed}/{total}", "bold"), bar, _line(f"{completed / max(1, total):.0%}  {times}"))

    def _render_work(self, what: str, done: int, total: int) -> RenderableType:
        progress = f": {done:,}/{total:,}" if total else ""
        return _row(self._spinner, _line(f"{what}{progress}", "cyan"))


def seconds_left(elapsed: float, done: int, remaining: int) -> str:
    """Estimate the time of the remaining steps from those that were done."""
    return format_seconds(elapsed / done * remaining) if done > 0 else "?"


def format_seconds(seconds: float) -> str:
    """Format a duration as hours, minutes and seconds."""
    total = max(0, round(seconds))
    return f"{total // 3600}:{total // 60 % 60:02d}:{total % 60:02d}"


def _line(text: str, style: str = "") -> Text:
    # one line each, however narrow the terminal is: lines that wrap would make the display jump
    return Text(text, style=style, no_wrap=True, overflow="ellipsis")


def _row(*cells: RenderableType) -> Table:
    row = Table.grid(padding=(0, 1))
    for _ in cells:
        row.add_column(no_wrap=True, overflow="ellipsis")
    row.add_row(*cells)
    return row
