"""The tables of a report that compare runs: one column per run."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from thresher.report.numbers import MISSING, format_number, format_percent, format_seconds
from thresher.report.rows import Row
from thresher.report.run_files import RunFiles
from thresher.report.speed import training_seconds

# where a run is stored says nothing about what it does, and every run has another place
_PLACES = ("output_dir", "logging_dir")


def outcome_rows(runs: Sequence[RunFiles]) -> list[Row]:
    """What came of the runs: progress, and the first and last evaluation, or the first and last logged steps."""
    rows = [Row("steps", [_progress(run) for run in runs])]
    for heading, metric, is_percent in (
        ("reward accuracy", "rewards/accuracies", True),
        ("loss", "loss", False),
        ("reward margin", "rewards/margins", False),
        ("chosen log-probability", "logps/chosen", False),
        ("log-ratio on the data (nats)", "kl", False),
        ("win rate", "samples/win_rate", True),
        ("reward of answers", "samples/reward", False),
        ("KL on answers (nats)", "samples/kl", False),
        ("length of answers (tokens)", "samples/lengths/policy", False),
        ("repeated phrases in answers", "samples/repetition/policy", True),
        ("answers that ended", "samples/ended/policy", True),
    ):
        cells = [first_to_last(run, metric, is_percent=is_percent) + _interval(run, metric) for run in runs]
        if any(cell != MISSING for cell in cells):
            rows.append(Row(heading, cells))
    seconds = [training_seconds(run) for run in runs]
    rows.append(Row("training time", [MISSING if each is None else format_seconds(each) for each in seconds]))
    for heading, records in (
        ("health events", [[each for each in run.health if "rule" in each] for run in runs]),
        ("recoveries", [run.recoveries for run in runs]),
        ("skipped steps", [run.skipped for run in runs]),
    ):
        if any(records):
            rows.append(Row(heading, [format_number(len(each)) for each in records]))
    return rows


def verdict(run: RunFiles) -> str:
    """One sentence that says what a run gained."""
    where, accuracy = _first_and_last(run, "rewards/accuracies")
    if accuracy is None:
        return f"{_progress(run)}."
    change = "rose" if accuracy[1] > accuracy[0] else "fell" if accuracy[1] < accuracy[0] else "stayed"
    sentence = f"{_progress(run)}. Reward accuracy on {where} pairs {change} "
    if change == "stayed":
        sentence += f"at {format_percent(accuracy[0])}"
    else:
        sentence += f"from {format_percent(accuracy[0])} to {format_percent(accuracy[1])}"
    _, chosen = _first_and_last(run, "logps/chosen")
    if chosen is None:
        return f"{sentence}."
    difference = chosen[1] - chosen[0]
    moved = "rose" if difference > 0 else "fell"
    return f"{sentence}; the log-probability of chosen responses {moved} by {format_number(abs(difference))} nats."


def first_to_last(run: RunFiles, metric: str, *, is_percent: bool = False) -> str:
    """A metric at the first and the last evaluation; of training steps without an evaluation."""
    _, both = _first_and_last(run, metric)
    if both is None:
        return MISSING
    # rounding noise of a policy that equals its reference
    largest = max(map(abs, both))
    first, last = (
        format_percent(each) if is_percent else format_number(0 if abs(each) < 1e-5 * largest else each)
        for each in both
    )
    return last if first == last else f"{first} → {last}"


def _interval(run: RunFiles, metric: str) -> str:
    """The confidence interval of the last value, if one is logged with it."""
    low, high = run.last(f"{metric}_low"), run.last(f"{metric}_high")
    return "" if low is None or high is None else f" (95 %: {format_percent(low)} to {format_percent(high)})"


def _first_and_last(run: RunFiles, metric: str) -> tuple[str, tuple[float, float] | None]:
    for where, name in (("validation", f"eval/{metric}"), ("training", metric)):
        values = [value for _, value in run.points(name) if math.isfinite(value)]
        if values:
            return where, (values[0], values[-1])
    return "training", None


def _progress(run: RunFiles) -> str:
    if run.num_steps is None:
        return f"{run.last_step:,} steps"
    if run.last_step >= run.num_steps:
        return f"All {run.num_steps:,} steps done"
    return f"{run.last_step:,} of {run.num_steps:,} steps"


def fact_rows(runs: Sequence[RunFiles]) -> list[Row]:
    """What was run: model, data, loss and so on; facts in which the runs differ come first."""
    return sorted(_compare([run.facts for run in runs]), key=lambda row: not row.differs)


def environment_rows(runs: Sequence[RunFiles]) -> list[Row]:
    """Versions and hardware."""
    return _compare([run.environment for run in runs])


def config_rows(runs: Sequence[RunFiles], defaults: Mapping[str, Any]) -> list[Row]:
    """Settings in which the runs differ; of a single run, those that are not the default."""
    flat = [flatten(run.config) for run in runs]
    if len(runs) > 1:
        return [row for row in _compare(flat) if row.differs and row.heading not in _PLACES]
    (only,), usual = flat, flatten(defaults)
    return [
        Row(key, [_text(value), _text(usual[key]) if key in usual else MISSING])
        for key, value in only.items()
        if key not in _PLACES and usual.get(key) != value
    ]


def metric_rows(runs: Sequence[RunFiles]) -> list[Row]:
    """The last value of every metric that was logged."""
    names = dict.fromkeys(name for run in runs for record in run.records for name in record if name != "step")
    return [Row(name, [format_number(run.last(name)) for run in runs]) for name in sorted(names)]


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested sections to dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def _compare(columns: Sequence[Mapping[str, Any]]) -> list[Row]:
    keys = dict.fromkeys(key for column in columns for key in column)
    rows = []
    for key in keys:
        cells = [_text(column[key]) if key in column else MISSING for column in columns]
        rows.append(Row(str(key), cells, differs=len(set(cells)) > 1))
    return rows


def _text(value: object) -> str:
    if value is None:
        return "not set"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, bool | list | Mapping) else str(value)
