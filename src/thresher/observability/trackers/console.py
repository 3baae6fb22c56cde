"""Progress on stderr: a live display on a terminal, otherwise one plain line per log call."""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console

from thresher.observability.health.rules import METRIC_PREFIX, RULES
from thresher.observability.trackers.live_display import LiveDisplay, format_seconds, seconds_left
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
    """Whether a live display fits: a terminal that moves its cursor, and no log of a CI job."""
    return console.is_interactive and not console.quiet and console.file.isatty() and not os.environ.get("CI")


class ConsoleTracker:
    """Show progress on stderr. Print other messages through the same console, so that they appear above the display.

    is_live: whether to use the live display; by default, where it fits.
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
        """Keep the live display, if any, also before the first step and between two attempts of a run."""
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
