"""Read what a run left in its log directory. Every file but the metrics is optional, and all of them are untrusted."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from thresher.builders.checkpoints import read_stored
from thresher.checkpoint.json_io import load_json
from thresher.checkpoint.manager import latest
from thresher.config import DPOConfig
from thresher.data.example import UNITS, Kind
from thresher.errors import UserError
from thresher.observability import log_files
from thresher.observability.trackers.jsonl import read_metrics, read_records
from thresher.redact import redact

Record = Mapping[str, Any]


@dataclass(frozen=True)
class RunFiles:
    """What one run left in its log directory."""

    name: str  # the shortest end of its path that no other run of the report has
    records: Sequence[Record]  # lines of the metrics
    description: Mapping[str, Any] = field(default_factory=dict)  # `run.json`, or only a config if there is none
    eval_pairs: Sequence[Record] = ()
    samples: Sequence[Record] = ()
    health: Sequence[Record] = ()
    recoveries: Sequence[Record] = ()
    skipped: Sequence[Record] = ()
    benchmarks: Sequence[Record] = ()

    @property
    def title(self) -> str:
        """exp_name, unless it is the default, which every run has."""
        name = self.config.get("exp_name")
        is_given = isinstance(name, str) and name != DPOConfig.model_fields["exp_name"].default
        return str(name) if is_given else self.name

    @property
    def config(self) -> Mapping[str, Any]:
        return self.section("config")

    def section(self, name: str) -> Mapping[str, Any]:
        """A section of the description; empty if it is missing or damaged."""
        return _mapping(self.description.get(name))

    @property
    def kind(self) -> Kind:
        return kind_of(_mapping(self.section("data").get("train")))

    @property
    def last_step(self) -> int:
        return max((record["step"] for record in self.records), default=0)

    @property
    def num_steps(self) -> int | None:
        """Steps of the plan; None if the run did not write it."""
        steps = self.description.get("num_steps")
        return steps if isinstance(steps, int) else None

    def points(self, metric: str) -> list[tuple[int, float]]:
        """The logged values of a metric by step."""
        return [(each["step"], each[metric]) for each in self.records if metric in each]

    def last(self, metric: str) -> float | None:
        """The last logged value of a metric."""
        points = self.points(metric)
        return points[-1][1] if points else None


def kind_of(data: Mapping[str, Any]) -> Kind:
    """The kind of a role's data; pairs in older runs, which do not say so."""
    return next((kind for kind in UNITS if kind == data.get("kind")), "pairs")


def unit_of(runs: Sequence[RunFiles]) -> str:
    """What the examples of the runs are called."""
    return UNITS[runs[0].kind] if len({run.kind for run in runs}) == 1 else "examples"


def read_runs(directories: Sequence[Path]) -> list[RunFiles]:
    """Read the runs of a report, in the given order."""
    resolved = [directory.resolve() for directory in directories]
    for directory in resolved:
        if resolved.count(directory) > 1:
            raise UserError(f"{directory} is given twice; name each run once")
    names = shortest_names([each.parent if each.name == "logs" else each for each in resolved])
    return [_read_run(directory, name) for directory, name in zip(resolved, names, strict=True)]


def shortest_names(paths: Sequence[Path]) -> list[str]:
    """Name each path by as many of its last parts as tell all of them apart."""
    for length in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-length:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


def _log_dir(directory: Path) -> Path:
    for candidate in (directory / "logs", directory):
        if (candidate / log_files.METRICS).is_file():
            return candidate
    raise UserError(
        f"there is no {log_files.METRICS} in {directory} or its logs; give the output_dir of a run, or its logging_dir"
    )


def _read_run(directory: Path, name: str) -> RunFiles:
    logs = _log_dir(directory)
    path = logs / log_files.METRICS
    try:
        metrics = read_metrics(path)
    except ValueError as error:
        raise UserError(f"{path} has a value that is not a number ({error}); repair the file") from None
    records = [{name: value for name, value in each.items() if isinstance(value, int | float)} for each in metrics]
    if not records:
        raise UserError(f"{path} is empty; the run has not logged a step yet")
    lists = {
        "eval_pairs": log_files.EVAL_PAIRS,
        "samples": log_files.SAMPLES,
        "health": log_files.HEALTH,
        "recoveries": log_files.RECOVERIES,
        "skipped": log_files.SKIPPED_STEPS,
        "benchmarks": log_files.EVAL_EXTERNAL,
    }
    others = {key: read_records(logs / file) for key, file in lists.items() if (logs / file).is_file()}
    return RunFiles(name, records, _read_description(logs, directory), **others)


def _read_description(logs: Path, directory: Path) -> Mapping[str, Any]:
    path = logs / log_files.DESCRIPTION
    if path.is_file():
        try:
            return redact(_mapping(json.loads(path.read_bytes())))
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path} is not valid JSON ({error}); remove it to report the metrics alone") from None
    checkpoint = latest(directory / "checkpoints", digests=False) if (directory / "checkpoints").is_dir() else None
    if checkpoint is None:
        return {}
    return {"config": redact(read_stored(_mapping(load_json(checkpoint / "config.json"))))}


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
