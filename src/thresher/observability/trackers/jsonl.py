"""The local log: `metrics.jsonl`, one JSON object per line.

Resuming from step k truncates the file to the records up to k, so the complete log equals an uninterrupted run's log.
JSON has no NaN and no infinities, so they are the strings `nan`, `inf` and `-inf`, which `float()` reads.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, TextIO

from thresher import durable
from thresher.errors import UserError
from thresher.observability.log_files import METRICS
from thresher.observability.trackers.tracker import RunInfo, Status, Table, rotate, translate_os_errors


class JsonlTracker:
    """Write metrics to `metrics.jsonl` in the run directory."""

    name = "jsonl"

    def __init__(self) -> None:
        self._file: TextIO | None = None

    def start(self, run: RunInfo, resume_step: int | None) -> None:
        """Open the log; the log of an earlier, separate run is renamed, never overwritten."""
        path = run.run_dir / METRICS
        _begin(path, resume_step)
        self._file = path.open("a", encoding="utf-8")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one line."""
        if self._file is None:
            raise RuntimeError("call start() before log()")
        if "step" in metrics:
            raise ValueError("`step` is reserved and cannot be the name of a metric")
        self._file.write(json.dumps({"step": step, **{k: encode_number(v) for k, v in metrics.items()}}) + "\n")
        self._file.flush()

    def log_table(self, step: int, table: Table) -> None:
        """The rows have their own file."""

    def close(self, status: Status) -> None:  # noqa: ARG002
        """Flush to the disk and close."""
        file, self._file = self._file, None
        if file is not None:
            with file:
                durable.sync_stream(file)


class StepLog:
    """A log in addition to the metrics: one JSON object with a `step` per line, synced to disk.

    The file exists only if a record was written. Resuming truncates it like the metrics.
    """

    def __init__(self, path: Path, resume_step: int | None) -> None:
        """Start a new log, or continue after `resume_step`; an earlier run's file is renamed, not overwritten."""
        self.path = path
        with translate_os_errors():
            _begin(path, resume_step)

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one line."""
        with translate_os_errors():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
                durable.sync_stream(file)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read a log of metrics, ignoring an incomplete last line."""
    return [
        {key: float(value) if isinstance(value, str) else value for key, value in record.items()}
        for record in read_records(path)
    ]


def read_records(path: Path) -> list[dict[str, Any]]:
    """Read a log whose values need not be numbers, ignoring an incomplete last line."""
    return [_loads(line) for line in _complete_lines(path)]


def find_holes(path: Path, until: int, logging_steps: int) -> str | None:
    """Say which training records up to a step a log lacks or has twice; None if it is complete.

    A log may start at a later step, if the run started from a checkpoint elsewhere.
    """
    records = read_records(path) if path.exists() else []
    counts = Counter(record["step"] for record in records if "lr" in record and record["step"] <= until)
    first = min(counts, default=logging_steps)
    interval = max(logging_steps, min((b - a for a, b in pairwise(sorted(counts))), default=0))  # of an earlier start
    missing = [step for step in range(first, until + 1) if step % interval == 0 and step not in counts]
    repeated = [step for step, count in sorted(counts.items()) if count > 1]
    for what, steps in (("has no record", missing), ("has several records", repeated)):
        if steps:
            which = f"step {steps[0]}" if len(steps) == 1 else f"{len(steps)} steps from {steps[0]} to {steps[-1]}"
            return f"{path} {what} of {which}; curves and reports show it so, unless you restore the file"
    return None


def _begin(path: Path, resume_step: int | None) -> None:
    if resume_step is None:
        rotate(path)
    elif path.exists():
        truncate_after(path, resume_step)


def truncate_after(path: Path, step: int) -> None:
    """Atomically rewrite a log without the records of later steps and without an incomplete last line."""
    kept = [line for line in _complete_lines(path) if _loads(line)["step"] <= step]
    durable.replace(path, "".join(f"{line}\n" for line in kept).encode())


def _complete_lines(path: Path) -> list[str]:
    # Every record ends with a newline: text after the last one is an interrupted write.
    lines = path.read_bytes().split(b"\n")[:-1]
    texts = []
    for number, line in enumerate(lines, start=1):
        try:
            record = _loads(line)
        except (ValueError, RecursionError):
            record = None
        if not isinstance(record, dict) or not isinstance(record.get("step"), int):
            raise UserError(f"line {number} of {path} is not a metrics record; repair the file or move it away")
        texts.append(line.decode("utf-8"))
    return texts


def _loads(line: str | bytes) -> Any:
    # an integer that no float can hold is as good as infinite
    return json.loads(line, parse_int=lambda digits: int(digits) if len(digits) <= 18 else float(digits))


def encode_number(value: float) -> float | str:
    """Return a number as JSON can hold it."""
    # float() converts tensors and NumPy scalars
    number = value if isinstance(value, int) else float(value)
    return number if math.isfinite(number) else repr(number)
