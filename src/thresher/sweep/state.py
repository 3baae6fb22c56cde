"""`sweep.json`: the grid of a sweep, the config of each trial, and the results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from thresher import durable
from thresher.builders.checkpoints import changed_settings
from thresher.checkpoint.json_io import encode, load_json
from thresher.config import DPOConfig
from thresher.errors import UserError
from thresher.redact import redact, redact_text
from thresher.sweep.grid import Trial

FILE_NAME = "sweep.json"
_VERSION = 1


def check_same_settings(directory: Path, trials: Sequence[Trial], configs: Sequence[DPOConfig]) -> list[str]:
    """Raise if an earlier sweep in this directory ran a trial with other settings; return its other trials."""
    path = directory / FILE_NAME
    if not path.is_file():
        return []
    stored = load_json(path)
    known = stored.get("trials") if isinstance(stored, dict) else None
    if not isinstance(known, list) or not all(isinstance(each, dict) and "name" in each for each in known):
        raise UserError(f"{path} is not the state of a sweep; move it away or set another output_dir")
    earlier = {each["name"]: each.get("config", {}) for each in known}
    for trial, config in zip(trials, configs, strict=True):
        changes = changed_settings(earlier[trial.name], config) if trial.name in earlier else []
        if changes:
            name, old, new = changes[0]
            raise UserError(
                f"{directory} contains a sweep with other settings ({name} was {old}, is {new}); set another output_dir"
            )
    return [name for name in earlier if name not in {trial.name for trial in trials}]


def write_sweep(
    directory: Path,
    trials: Sequence[Trial],
    configs: Sequence[DPOConfig],
    described: Mapping[str, Any],
    results: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Write the grid, and the results if there are any."""
    rows = [
        {
            "name": trial.name,
            "overrides": [redact_text(text) for text in trial.overrides],
            "values": dict(trial.values),
            **(results[index] if results else {}),
            "config": redact(config.model_dump(mode="json")),
        }
        for index, (trial, config) in enumerate(zip(trials, configs, strict=True))
    ]
    directory.mkdir(parents=True, exist_ok=True)
    content = {"version": _VERSION, **described, "trials": rows}
    durable.replace(directory / FILE_NAME, encode(content))
