"""Progress on stderr: a live display on a terminal, otherwise one plain line per log call."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table as Grid
from rich.text import Text

from thresher.observability.health.rules import METRIC_PREFIX, RULES
from thresher.observability.trackers.tracker import RunInfo, Status, Table
from thresher.redact import escape_control_chars, redact_text

# The metrics that are shown, and their format.
_SHOWN = (
    ("loss", "loss {:.4f}"),
    ("rewards/accuracies", "accuracy {:.3f}"),
    ("rewards/margins", "margin {:.4f}"),
    ("pairs_per_second", "{:.1f} pairs/s"),
)
_SHOWN_LIVE = (*_SHOWN[:-1], ("kl", "log-ratio {:.4f}"), _SHOWN[-1])
_SHOWN_OF_EVALUATIONS = tuple((f"eval/{name}", pattern) for name, pattern in _SHOWN)
_SUMMARIES = {f"{METRIC_PREFIX}{rule.name}": f"{rule.name}, {rule.summary}" for rule in RULES}


def can_redraw(console: Console) -> bool:
    """Whether a live display fits: an interactive terminal, not a CI log."""
    return console.is_interactive and not console.quiet and console.file.isatty() and not os.environ.get("CI")


class ConsoleTracker:
    """Show progress on stderr. Print other messages through the same console, so that they appear above the display.

    Args:
        is_live: Whether to use the live display; by default, where it fits.
    """

    name = "console"

    def __init__(
        self,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        is_live: bool | None = None,
    ) -> None:
        self._console = console or Console(stderr=True)
        self._clock = clock
        self._is_live = can_redraw(self._console) if is_live is None else is_live
        self._display: LiveDisplay | None = None
        self._keeps_display = False
        self._total_steps = 0
        self._first_step = 0
        self._started_at = 0.0
        self._num_attempts = 0
        self._last_step = ""
        self._health_from: int | None = None
        self._total_pairs = 0

    @contextmanager
    def displayed(self) -> Iterator[None]:
        """Keep the live display, if any, before the first step and between two attempts of a run too."""
        self._open_display()
        self._keeps_display = True
        try:
            yield
        finally:
            self._keeps_display = False
            self._close_display()

    def start(self, run: RunInfo, resume_step: int | None) -> None:
        """Describe the run, and show its steps from here on."""
        self._total_steps = run.total_steps
        self._total_pairs, self._health_from = run.total_pairs, run.health_from
        self._first_step = max(0, resume_step or 0)
        self._started_at = self._clock()
        self._num_attempts += 1
        self._last_step = ""
        start = f"resumed after step {resume_step}" if self._first_step else f"{run.total_pairs} pairs"
        self.print(f"{run.exp_name}: {run.total_steps} steps, {start}, in {run.run_dir}")
        self._open_display()
        if self._display is not None:
            self._display.begin_steps(self._first_step, run.total_steps)
            self._display.show_without_event(self._without_event(0))
            if self._num_attempts > 1:
                restart = f"resumed after step {self._first_step}" if self._first_step else "started again"
                self._display.show_event(f"attempt {self._num_attempts}, {restart}")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the metrics of a step; evaluation metrics get a separate line."""
        if evaluated := _format(metrics, _SHOWN_OF_EVALUATIONS):
            self.print(f"step {step}/{self._total_steps}  evaluation: {evaluated}")
        if self._display is not None:
            for name, summary in _SUMMARIES.items():
                if name in metrics:
                    self._display.show_event(f"health at step {step}: {summary}")
        if not (shown := _format(metrics, _SHOWN)):
            return
        self._last_step = f"step {step}/{self._total_steps}  {shown}"
        if self._display is not None:
            self._display.show_step(step, _format(metrics, _SHOWN_LIVE))
            self._display.show_without_event(self._without_event(metrics.get("pairs_seen", 0)))
        else:
            elapsed, done = self._clock() - self._started_at, step - self._first_step
            self.print(f"{self._last_step}  eta {seconds_left(elapsed, done, self._total_steps - step)}")

    def _without_event(self, pairs_seen: float) -> str:
        """What it means that no health rule has fired."""
        if self._health_from is None:
            return "health is off"
        if pairs_seen >= self._health_from:
            return "no events"
        reach = ", and this run has fewer" if self._total_pairs < self._health_from else ""
        return f"no events yet; most health rules compare from pair {self._health_from:,} on{reach}"

    def show_work(self, what: str, done: int = 0, total: int = 0) -> bool:
        """Show other work than steps in the live display; return False if there is none."""
        if self._display is None:
            return False
        self._display.show_work(escape_control_chars(redact_text(what)), done, total)
        return True

    def log_table(self, step: int, table: Table) -> None:
        """Show nothing: a terminal is too narrow for answers."""

    def close(self, status: Status) -> None:
        """Print how the run ended, and the last step, which the live display no longer shows."""
        if self._display is not None:
            self._display.end_steps()
            if self._last_step:
                self.print(self._last_step)
        if not self._keeps_display:
            self._close_display()
        self.print(f"{status} after {format_seconds(self._clock() - self._started_at)}")

    def print(self, message: str) -> None:
        """Print a message above the display, without markup or line wrapping."""
        self._console.print(escape_control_chars(redact_text(message)), markup=False, highlight=False, soft_wrap=True)

    def erase(self) -> None:
        """Erase the live display: the process is about to exit."""
        self._close_display()

    def _open_display(self) -> None:
        if self._is_live and self._display is None:
            self._display = LiveDisplay(self._console, self._clock)
            self._display.start()

    def _close_display(self) -> None:
        display, self._display = self._display, None
        if display is not None:
            display.stop()


def _format(metrics: Mapping[str, float], patterns: Iterable[tuple[str, str]]) -> str:
    return "  ".join(pattern.format(metrics[name]) for name, pattern in patterns if name in metrics)


_REFRESHES_PER_SECOND = 4
_BAR_WIDTH = 30


class LiveDisplay:
    """A few lines at the bottom of a terminal, redrawn in place: steps, metrics, the last event and the current work.

    It shows what `ConsoleTracker` passes on and computes nothing but times. Before the first step, and between two
    attempts of a run, the work is all there is to show. Stopping it erases its lines.
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


def _row(*cells: RenderableType) -> Grid:
    row = Grid.grid(padding=(0, 1))
    for _ in cells:
        row.add_column(no_wrap=True, overflow="ellipsis")
    row.add_row(*cells)
    return row
