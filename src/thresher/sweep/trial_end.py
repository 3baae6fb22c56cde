"""How a trial ended, in a file of its run directory."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

from thresher import durable
from thresher.errors import UserError

_FILE_NAME = "trial.json"

State = Literal["finished", "stopped early", "stopped by health", "interrupted", "failed"]


@dataclass(frozen=True)
class TrialEnd:
    """How a trial ended; message: the reason, of a trial that failed or was stopped by a health rule."""

    state: State
    message: str = ""

    @property
    def is_final(self) -> bool:
        """Whether no step is left to do. A trial that was stopped early continues if the scheduler lets it."""
        return self.state in ("finished", "stopped by health")


def write_end(directory: Path, end: TrialEnd) -> None:
    durable.replace(directory / _FILE_NAME, json.dumps(asdict(end)).encode())


def read_end(directory: Path) -> TrialEnd | None:
    """Return how a trial ended; None if it has not ended."""
    path = directory / _FILE_NAME
    if not path.is_file():
        return None
    try:
        values = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict) or values.get("state") not in get_args(State):
        raise UserError(f"{path} does not say how the trial ended; delete it to resume the trial")
    return TrialEnd(values["state"], str(values.get("message", "")))
