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
    ("pairs_per_second", "{:.1f} {unit}/s"),
)
_SHOWN_LIVE = (*_SHOWN[:-1], ("kl", "log ratio {:.4f}"), _SHOWN[-1])
_SHOWN_OF_EVALUATIONS = tuple((f"eval/{name}", pattern) for name, pattern in _SHOWN)
_REFRESHES_PER_SECOND = 4
_BAR_WIDTH = 30
_SUMMARIES = {f"{METRIC_PREFIX}{rule.name}": f"{rule.name}, {rule.summary}" for rule in RULES}


def can_redraw(console: Console) -> bool:
    """Whether a live display fits: an interactive terminal, not a CI log."""
    return console.is_interactive and not console.quiet and console.file.isatty() and not os.environ.get("CI")


class ConsoleTracker:
    """Show progress on stderr. Print other messages through the same console, so that they appear above the display.

    The live display is a few lines at the bottom of a terminal, redrawn in place: steps, metrics, the last event and
    the current work. Before the first step, and between two attempts of a run, the work is all there is to show.

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
        self._live: Live | None = None
        self._keeps_display = False
        self._run: RunInfo | None = None  # None before and between attempts
        self._first_step = self._step = self._num_attempts = 0
        self._started_at = self._steps_started_at = self._pairs_seen = 0.0
        self._last_step = self._metrics = self._event = ""
        self._work: tuple[str, int, int] | None = None
        self._spinner = Spinner("dots", style="cyan")

    @contextmanager
    def displayed(self) -> Iterator[None]:
        """Keep the live display, if any, before the first step and between two attempts of a run too."""
        self._open_display()
        self._keeps_display = True
        try:
            yield
        finally:
            self._keeps_display = False
            self.erase()

    def start(self, run: RunInfo, resume_step: int | None) -> None:
        """Describe the run, and show its steps from here on."""
        self._first_step = self._step = max(0, resume_step or 0)
        self._started_at = self._steps_started_at = self._clock()
        self._pairs_seen = 0.0
        self._num_attempts += 1
        self._last_step = self._metrics = ""
        start = f"resumed after step {resume_step}" if self._first_step else f"{run.total_pairs} {run.unit}"
        self.print(f"{run.exp_name}: {run.total_steps} steps, {start}, in {run.run_dir}")
        self._open_display()
        self._run, self._work = run, None
        if self._num_attempts > 1:
            restart = f"resumed after step {self._first_step}" if self._first_step else "started again"
            self._event = f"attempt {self._num_attempts}, {restart}"

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the metrics of a step; evaluation metrics get a separate line."""
        total_steps, unit = (0, "") if self._run is None else (self._run.total_steps, self._run.unit)
        if evaluated := _format(metrics, _SHOWN_OF_EVALUATIONS, unit):
            self.print(f"step {step}/{total_steps}  evaluation: {evaluated}")
            if self._step == self._first_step:  # what precedes the first step says nothing about the others
                self._steps_started_at = self._clock()
        for name, summary in _SUMMARIES.items():
            if name in metrics:
                self._event = f"health at step {step}: {summary}"
        if not (shown := _format(metrics, _SHOWN, unit)):
            return
        self._last_step = f"step {step}/{total_steps}  {shown}"
        self._step, self._metrics, self._work = step, _format(metrics, _SHOWN_LIVE, unit), None
        self._pairs_seen = metrics.get("pairs_seen", 0)
        if self._live is None:
            self.print(f"{self._last_step}  eta {self._time_left(total_steps)}")

    def show_work(self, what: str, done: int = 0, total: int = 0) -> bool:
        """Show work other than steps in the live display, with its progress if known; return False if there is none."""
        if self._live is None:
            return False
        self._work = (escape_control_chars(redact_text(what)), done, total)
        return True

    def log_table(self, step: int, table: Table) -> None:
        """Show nothing: a terminal is too narrow for answers."""

    def close(self, status: Status) -> None:
        """Print how the run ended, and the last step, which the live display no longer shows."""
        self._run = self._work = None
        if self._live is not None and self._last_step:
            self.print(self._last_step)
        if not self._keeps_display:
            self.erase()
        self.print(f"{status} after {format_seconds(self._clock() - self._started_at)}")

    def print(self, message: str) -> None:
        """Print a message above the display, without markup or line wrapping."""
        self._console.print(escape_control_chars(redact_text(message)), markup=False, highlight=False, soft_wrap=True)

    def erase(self) -> None:
        """Erase the live display and show the cursor again."""
        live, self._live = self._live, None
        if live is not None:
            live.stop()

    def _open_display(self) -> None:
        if self._is_live and self._live is None:
            self._event, self._work = "", None
            self._live = Live(
                console=self._console,
                get_renderable=self._render,
                refresh_per_second=_REFRESHES_PER_SECOND,
                transient=True,
            )
            self._live.start()

    def _render(self) -> RenderableType:
        run, work = self._run, self._work  # another thread draws
        lines: list[RenderableType] = []
        if run is not None:
            elapsed, share = format_seconds(self._clock() - self._started_at), self._step / max(1, run.total_steps)
            bar = ProgressBar(total=max(1, run.total_steps), completed=self._step, width=_BAR_WIDTH)
            times = _line(f"{share:.0%}  {elapsed} elapsed, {self._time_left(run.total_steps)} left")
            lines.append(_row(_line(f"step {self._step}/{run.total_steps}", "bold"), bar, times))
            lines.append(_line(self._metrics or "waiting for the first step"))
        if self._event:
            lines.append(_line(f"last event: {self._event}", "yellow"))
        elif run is not None:
            lines.append(_line(_without_event(run, self._pairs_seen), "dim"))
        if work is not None:
            what, done, total = work
            lines.append(_row(self._spinner, _line(f"{what}: {done:,}/{total:,}" if total else what, "cyan")))
        return Group(*lines)

    def _time_left(self, total_steps: int) -> str:
        """Estimate the time of the remaining steps from the ones that were done."""
        done = self._step - self._first_step
        seconds_per_step = (self._clock() - self._steps_started_at) / max(1, done)
        return format_seconds(seconds_per_step * (total_steps - self._step)) if done > 0 else "?"


def _without_event(run: RunInfo, pairs_seen: float) -> str:
    """What it means that no health rule has fired."""
    if run.health_from is None:
        return "health is off"
    if pairs_seen >= run.health_from:
        return "no events"
    reach = ", and this run has fewer" if run.total_pairs < run.health_from else ""
    return f"no events yet; most health rules start at {run.unit.removesuffix('s')} {run.health_from:,}{reach}"


def _format(metrics: Mapping[str, float], patterns: Iterable[tuple[str, str]], unit: str) -> str:
    return "  ".join(pattern.format(metrics[name], unit=unit) for name, pattern in patterns if name in metrics)


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
