"""Sweep results: each trial's last metrics, and means with intervals over seeds."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from thresher import durable
from thresher.errors import UserError
from thresher.observability.log_files import METRICS
from thresher.observability.trackers.jsonl import read_metrics
from thresher.sweep.grid import Trial

Mode = Literal["max", "min"]
State = Literal["finished", "stopped early", "stopped by health", "interrupted", "failed"]

_END_FILE = "trial.json"

# shown next to the swept metric, if they were logged
_SHOWN = ("eval/rewards/accuracies", "eval/loss", "eval/kl", "samples/reward", "samples/win_rate", "samples/kl")
_SHOWN_WITHOUT_EVALUATION = ("rewards/accuracies", "loss", "kl")
# 97.5 % points of Student's t distribution by degrees of freedom
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
_NOT_RESULTS = ("time/", "memory/", "tokens/", "pairs_per_second", "useful_tokens_per_second")


@dataclass(frozen=True)
class TrialEnd:
    """How a trial ended, as stored in its run directory."""

    state: State
    message: str = ""  # why it failed, or which health rule stopped it

    @property
    def is_final(self) -> bool:
        """Whether a resumed sweep leaves the trial as it is."""
        return self.state not in ("interrupted", "failed")


@dataclass(frozen=True)
class Result:
    """The outcome of one trial."""

    trial: Trial
    end: TrialEnd
    step: int  # the last logged one
    metrics: Mapping[str, float]  # the last logged value of each

    def to_json(self) -> dict[str, Any]:
        """The outcome as `sweep.json` stores it."""
        return {**asdict(self.end), "step": self.step, "metrics": dict(self.metrics)}


@dataclass(frozen=True)
class Group:
    """Finished trials that differ only in their seed."""

    values: Mapping[str, str]
    num_trials: int
    metrics: Mapping[str, tuple[float, float]]  # mean, and half the width of its 95 % interval (NaN for one trial)


def write_end(directory: Path, end: TrialEnd) -> None:
    durable.replace(directory / _END_FILE, json.dumps(asdict(end)).encode())


def read_end(directory: Path) -> TrialEnd | None:
    """Return how a trial ended; None if it has not ended."""
    path = directory / _END_FILE
    if not path.is_file():
        return None
    try:
        values = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict) or values.get("state") not in get_args(State):
        raise UserError(f"{path} does not say how the trial ended; delete it to resume the trial")
    return TrialEnd(values["state"], str(values.get("message", "")))


def read_result(trial: Trial, end: TrialEnd, log_dir: Path) -> Result:
    """Read what a trial logged, without times and sizes, which say nothing about the settings."""
    path = log_dir / METRICS
    metrics: dict[str, float] = {}
    for record in read_metrics(path) if path.is_file() else ():
        metrics |= record
    step = int(metrics.pop("step", 0))
    return Result(trial, end, step, {name: metrics[name] for name in metrics if not name.startswith(_NOT_RESULTS)})


def ranked(results: Sequence[Result], metric: str, mode: Mode) -> list[Result]:
    """Sort by the metric, best first; trials without it come last, in grid order."""

    def key(result: Result) -> tuple[bool, float]:
        value = result.metrics.get(metric, math.nan)
        return (math.isnan(value), 0.0 if math.isnan(value) else -value if mode == "max" else value)

    return sorted(results, key=key)


def shown_metrics(results: Sequence[Result], metric: str) -> list[str]:
    """Choose the table's metrics: the swept one, and the usual ones that were logged."""
    logged = {name for result in results for name in result.metrics}
    others = [name for name in _SHOWN if name in logged]
    if not any(name.startswith("eval/") for name in logged):
        others += [name for name in _SHOWN_WITHOUT_EVALUATION if name in logged]
    return [metric, *(name for name in others if name != metric)]


def group_by_seed(results: Sequence[Result]) -> list[Group]:
    """Average the trials that differ only in their seed; empty if no seed was swept."""
    members: dict[tuple[tuple[str, str], ...], list[Result]] = {}
    for result in results:
        if "seed" in result.trial.values and result.end.state == "finished":
            others = tuple((name, value) for name, value in result.trial.values.items() if name != "seed")
            members.setdefault(others, []).append(result)
    return [Group(dict(values), len(group), _summaries(group)) for values, group in members.items()]


def describe_groups(results: Sequence[Result]) -> list[dict[str, Any]]:
    """The means over seeds as `sweep.json` stores them."""
    return [
        {
            "values": dict(group.values),
            "num_trials": group.num_trials,
            "metrics": {name: {"mean": mean, "half_width": width} for name, (mean, width) in group.metrics.items()},
        }
        for group in group_by_seed(results)
    ]


def _summaries(results: Sequence[Result]) -> dict[str, tuple[float, float]]:
    common = [name for name in results[0].metrics if all(name in each.metrics for each in results)]
    return {name: mean_and_interval([each.metrics[name] for each in results]) for name in common}


def mean_and_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean, and half the width of its 95 % interval by Student's t distribution."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, math.nan
    freedom = len(values) - 1
    quantile = _T[freedom - 1] if freedom <= len(_T) else _t_quantile(freedom)
    return mean, quantile * statistics.stdev(values) / math.sqrt(len(values)) if math.isfinite(mean) else math.nan


def _t_quantile(freedom: int) -> float:
    """The 97.5 % point of Student's t distribution for many degrees of freedom (Abramowitz and Stegun, 26.7.5)."""
    z = statistics.NormalDist().inv_cdf(0.975)
    return (
        z
        + (z**3 + z) / (4 * freedom)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3)
    )
