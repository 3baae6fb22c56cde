"""TensorBoard event files in `tensorboard/` in the run directory, or in a directory that the user names."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from thresher.observability.trackers.tracker import RunInfo, Status, Table, import_tracker_library, rotate

# all ASCII punctuation but that of numbers and sentences
_MARKUP = re.compile(r"[!-+/:-@\[-`{-~]")


class TensorBoardTracker:
    """Write scalars through torch's SummaryWriter."""

    name = "tensorboard"

    def __init__(self, directory: str | None = None) -> None:
        self._library = import_tracker_library("torch.utils.tensorboard", "tensorboard")
        self._directory = directory
        self._writer: Any = None

    def start(self, run: RunInfo, resume_step: int | None) -> None:
        """Open a new event file; when resuming, one that hides the points after `resume_step`."""
        directory = Path(self._directory) / run.exp_name if self._directory else run.run_dir / "tensorboard"
        if resume_step is None:
            rotate(directory)
        purge_step = None if resume_step is None else resume_step + 1
        self._writer = self._library.SummaryWriter(str(directory), purge_step=purge_step)
        if resume_step is None:
            text = json.dumps(dict(run.config), indent=2, default=str)
            self._writer.add_text("config", "\n".join(f"    {line}" for line in text.splitlines()))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one scalar per metric."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, float(value), step)
        # A killed run loses unflushed points, and a resume would not log them again.
        self._writer.flush()

    def log_table(self, step: int, table: Table) -> None:
        """Write a table as Markdown, which the page of texts shows with a slider over steps."""
        lines = [table.columns, ["---"] * len(table.columns), *table.rows]
        text = "\n".join(f"| {' | '.join(_cell(value) for value in line)} |" for line in lines)
        self._writer.add_text(table.name, text, step)
        self._writer.flush()

    def close(self, status: Status) -> None:  # noqa: ARG002
        """Close the event file."""
        self._writer.close()


def _cell(value: str | float) -> str:
    """Write a value so that no character of it is Markdown, HTML or the end of the cell."""
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    escaped = _MARKUP.sub(lambda match: f"&#{ord(match[0])};", text)
    return "<br>".join(escaped.splitlines())
