"""Progress on stderr: a bar on a terminal, otherwise one plain line per log call."""

import time
from collections.abc import Callable, Iterable, Mapping

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from thresher.observability.trackers.tracker import RunInfo, Status
from thresher.redact import escape_control_chars, redact_text

# The metrics that are shown, and their format.
_SHOWN = (
    ("loss", "loss {:.4f}"),
    ("rewards/accuracies", "accuracy {:.3f}"),
    ("rewards/margins", "margin {:.4f}"),
    ("pairs_per_second", "{:.1f} pairs/s"),
)
_SHOWN_OF_EVALUATIONS = tuple((f"eval/{name}", pattern) for name, pattern in _SHOWN)


class ConsoleTracker:
    """Show progress on stderr. Print other messages through the same console, so that they do not break the bar."""

    name = "console"

    def __init__(self, console: Console | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console or Console(stderr=True)
        self._clock = clock
        self._progress: Progress | None = None
        self._task = TaskID(0)
        self._total_steps = 0
        self._first_step = 0
        self._started_at = 0.0

    def start(self, run: RunInfo, resume_step: int | None) -> None:
        """Describe the run, and start the bar on a terminal."""
        self._total_steps = run.total_steps
        self._first_step = max(0, resume_step or 0)
        self._started_at = self._clock()
        start = f"resumed after step {resume_step}" if self._first_step else f"{run.total_pairs} pairs"
        self.print(f"{run.exp_name}: {run.total_steps} steps, {start}, in {run.run_dir}")
        if not self._console.is_terminal:
            return
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[shown]}", markup=False),
            console=self._console,
        )
        self._task = self._progress.add_task(run.exp_name, total=run.total_steps, completed=self._first_step, shown="")
        self._progress.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the metrics of a step; evaluation metrics get a separate line."""
        if evaluated := _format(metrics, _SHOWN_OF_EVALUATIONS):
            self.print(f"step {step}/{self._total_steps}  evaluation: {evaluated}")
        if not (shown := _format(metrics, _SHOWN)):
            return
        if self._progress is not None:
            self._progress.update(self._task, completed=step, shown=shown)
        else:
            self.print(f"step {step}/{self._total_steps}  {shown}  eta {self._time_left(step)}")

    def show_in_bar(self, what: str, done: int, total: int) -> bool:
        """Show the progress of other work in place of the metrics; return False if there is no bar."""
        if self._progress is None:
            return False
        self._progress.update(self._task, shown=f"{what}: {done}/{total}")
        return True

    def close(self, status: Status) -> None:
        """Stop the bar and print how the run ended."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
        self.print(f"{status} after {format_seconds(self._clock() - self._started_at)}")

    def print(self, message: str) -> None:
        """Print a message above the bar, without markup or line wrapping."""
        self._console.print(escape_control_chars(redact_text(message)), markup=False, highlight=False, soft_wrap=True)

    def _time_left(self, step: int) -> str:
        done = step - self._first_step
        if done <= 0:
            return "?"
        return format_seconds((self._clock() - self._started_at) / done * (self._total_steps - step))


def _format(metrics: Mapping[str, float], patterns: Iterable[tuple[str, str]]) -> str:
    return "  ".join(pattern.format(metrics[name]) for name, pattern in patterns if name in metrics)


def format_seconds(seconds: float) -> str:
    """Format a duration as hours, minutes and seconds."""
    total = max(0, round(seconds))
    return f"{total // 3600}:{total // 60 % 60:02d}:{total % 60:02d}"
