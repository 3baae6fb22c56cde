"""The local log: `metrics.jsonl`, one JSON object a line, the record of the run.

After a resume from step k the file holds exactly the records up to k and goes on from there, so that it ends
equal to the log of a run that never stopped. NaN and the infinities are the strings `nan`, `inf`, `-inf`,
which `float()` reads, because JSON has no word for them.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from thresher import durable
from thresher.errors import UserError
from thresher.observability.trackers.tracker import RunInfo, Status, rotate

FILE_NAME = "metrics.jsonl"


class JsonlTracker:
    """Write metrics to `metrics.jsonl` in the run's directory."""

    name = "jsonl"

    def __init__(self) -> None:
        self._file: TextIO | None = None

    def start(self, run: RunInfo, resume_step: int | None) -> None:
        """Open the log; a log that an earlier, separate run left there is renamed, never overwritten."""
        path = run.run_dir / FILE_NAME
        if resume_step is None:
            rotate(path)
        elif path.exists():
            truncate_after(path, resume_step)
        self._file = path.open("a", encoding="utf-8")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one line."""
        if self._file is None:
            raise RuntimeError("the tracker must be started before it can log")
        if "step" in metrics:
            raise ValueError("`step` is the name of the step itself and cannot be a metric")
        self._file.write(json.dumps({"step": step, **{k: _spell(v) for k, v in metrics.items()}}) + "\n")
        self._file.flush()

    def close(self, status: Status) -> None:  # noqa: ARG002
        """Flush to the disk and close."""
        file, self._file = self._file, None
        if file is not None:
            with file:
                durable.sync_stream(file)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read a log; a last line that was cut off is left out."""
    return [_unspell(json.loads(line)) for line in _whole_lines(path)]


def truncate_after(path: Path, step: int) -> None:
    """Rewrite a log, in one atomic move, without its records of later steps and without a torn last line."""
    kept = [line for line in _whole_lines(path) if json.loads(line)["step"] <= step]
    durable.replace(path, "".join(f"{line}\n" for line in kept).encode())


def _whole_lines(path: Path) -> list[str]:
    # Only a newline ends a record: what stands behind the last one was cut off while it was written.
    lines = path.read_bytes().split(b"\n")[:-1]
    texts = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if not isinstance(record, dict) or not isinstance(record.get("step"), int):
            raise UserError(f"line {number} of {path} is not a metrics record; repair the file or move it away")
        texts.append(line.decode("utf-8"))
    return texts


def _spell(value: float) -> float | str:
    # float(): a tensor or NumPy scalar is written as the number that it is.
    number = value if isinstance(value, int) else float(value)
    return number if math.isfinite(number) else repr(number)


def _unspell(record: dict[str, Any]) -> dict[str, Any]:
    return {key: float(value) if isinstance(value, str) else value for key, value in record.items()}
