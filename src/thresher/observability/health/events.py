"""Health events and their log `health.jsonl`, one JSON object per line.

The file exists only if a rule fired. A resume from step k keeps the lines up to k, as in the metric log. A line with
`continued` records that a run was resumed after a stop, and what changed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from thresher import durable
from thresher.observability import log_files
from thresher.observability.trackers.jsonl import read_records, truncate_after
from thresher.observability.trackers.tracker import rotate, translate_os_errors

Action = Literal["warn", "stop"]


@dataclass(frozen=True)
class HealthEvent:
    """A rule that fired after a step: what happened, the numbers that prove it, and what to change."""

    step: int
    rule: str
    summary: str
    evidence: Mapping[str, float]
    advice: str

    def __str__(self) -> str:
        numbers = ", ".join(f"{name} {value:.4g}" for name, value in self.evidence.items())
        return f"health: {self.rule} at step {self.step}: {self.summary} ({numbers}); {self.advice}"


class HealthLog:
    """Writes events to `health.jsonl` in the log directory of the run."""

    def __init__(self, run_dir: Path, resume_step: int | None) -> None:
        """Start a new log, or continue after `resume_step`; the file of an earlier run is renamed, not overwritten."""
        self.path = run_dir / log_files.HEALTH
        with translate_os_errors():
            if resume_step is None:
                rotate(self.path)
            elif self.path.exists():
                truncate_after(self.path, resume_step)

    def write(self, event: HealthEvent, action: Action) -> None:
        self._append(asdict(event) | {"action": action})

    def write_continued(self, step: int, changes: list[str]) -> None:
        """Record that the run continues in spite of the events so far."""
        self._append({"step": step, "continued": changes})

    def _append(self, line: Mapping[str, Any]) -> None:
        with translate_os_errors():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
                durable.sync_stream(file)


def rules_that_stopped(run_dir: Path, step: int) -> list[str]:
    """Return the rules that stopped a run up to a step and after which it was not continued."""
    path = run_dir / log_files.HEALTH
    if not path.exists():
        return []
    rules: list[str] = []
    for line in read_records(path):
        if line["step"] > step:
            break
        if "continued" in line:
            rules = []
        elif line["action"] == "stop":
            rules.append(line["rule"])
    return rules
