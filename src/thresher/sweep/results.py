"""The results of a sweep: the last metrics of each trial, and means with intervals over seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from thresher.observability.log_files import METRICS
from thresher.observability.trackers.jsonl import read_metrics
from thresher.sweep.grid import Trial
from thresher.sweep.trial_end import TrialEnd

Mode = Literal["max", "min"]

# shown beside the metric of the sweep, if they were logged
_SHOWN = (
    "eval/rewards/accuracies",
    "eval/loss",
    "eval/kl",
    "samples/reward",
    "samples/win_rate",
    "samples/kl",
)
_SHOWN_WITHOUT_EVALUATION = ("rewards/accuracies", "loss", "kl")
# 97.5 % points of Student's t distribution by degrees of freedom
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
_NOT_RESULTS = ("time/", "memory/", "tokens/", "pairs_per_second", "useful_tokens_per_second")


@dataclass(frozen=True)
class Result:
    """The outcome of one trial; metrics: the last logged value of each. step: the last one that was logged."""

    trial: Trial
    end: TrialEnd
    step: int
    metrics: Mapping[str, float]

    def to_json(self) -> dict[str, Any]:
        """The part of `sweep.json` that describes the outcome."""
        return {
            "state": self.end.state,
            "message": self.end.message,
            "step": self.step,
            "metrics": dict(self.metrics),
        }


@dataclass(frozen=True)
class Group:
    """Trials that differ only in their seed. metrics: mean, and half the width of the 95 % interval, NaN of one."""

    values: Mapping[str, str]
    num_trials: int
    metrics: Mapping[str, tuple[float, float]]


def read_result(trial: Trial, end: TrialEnd, log_dir: Path) -> Result:
    """Read what a trial logged; times and sizes are left out, since they say nothing about the settings."""
    path = log_dir / METRICS
    metrics: dict[str, float] = {}
    for record in read_metrics(path) if path.is_file() else ():
        metrics |= record
    step = int(metrics.pop("step", 0))
    return Result(trial, end, step, {name: metrics[name] for name in metrics if not name.startswith(_NOT_RESULTS)})


def ranked(results: Sequence[Result], metric: str, mode: Mode) -> list[Result]:
    """Sort by the metric, best first; trials without it come last, in the order of the grid."""

    def key(result: Result) -> tuple[bool, float]:
        value = result.metrics.get(metric, math.nan)
        return (math.isnan(value), 0.0 if math.isnan(value) else -value if mode == "max" else value)

    return sorted(results, key=key)


def shown_metrics(results: Sequence[Result], metric: str) -> list[str]:
    """The metrics of the table: that of the sweep, and the usual ones that were logged."""
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
