"""The curves of a report: what is drawn over the steps, and what good looks like."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from thresher.report.charts import Chart, line_chart
from thresher.report.run_files import RunFiles
from thresher.report.series import Parts, Series, lines

TRAINING, VALIDATION = "training", "validation"
CHOSEN, REJECTED = "chosen", "rejected"
_KINDS = {TRAINING: "", VALIDATION: "eval/"}
_MAX_POINTS_OF_PAGE = 40_000
_LINES_PER_RUN = 24


class _Curve(NamedTuple):
    """metric: its name in the log. at: a value to draw a line at."""

    metric: str
    title: str
    caption: str
    unit: str
    is_percent: bool = False
    is_log: bool = False
    at: float | None = None
    has_noise: bool = True


_CURVES = (
    _Curve(
        "loss",
        "Loss",
        "Good: falls, then levels off, on training and validation pairs alike. If only the validation loss rises "
        "again, the run overfits: stop earlier, or train with a lower learning rate.",
        "loss",
    ),
    _Curve(
        "rewards/accuracies",
        "Reward accuracy",
        "Good: the share of pairs whose chosen response has the higher reward rises well above 50 % on validation "
        "pairs. At 50 % the model has learned nothing.",
        "accuracy",
        is_percent=True,
        at=0.5,
    ),
    _Curve(
        "rewards/margins",
        "Reward margin",
        "Good: chosen minus rejected reward rises steadily above 0 and levels off.",
        "margin",
        at=0.0,
    ),
    _Curve(
        "kl",
        "Log-ratio on the data",
        "Good: stays small. log(policy / reference) of the responses of the data, mean of both sides, in nats per "
        "response. It falls where rejected responses become less likely; far below 0, the policy has become unlikely "
        "to give any response of the data.",
        "log-ratio (nats)",
        at=0.0,
    ),
    _Curve(
        "entropy",
        "Entropy",
        "Good: falls slowly or not at all. A collapse towards 0 means that the model repeats itself.",
        "entropy (nats)",
    ),
    _Curve(
        "grad_norm",
        "Gradient norm",
        "Good: steady, without high peaks. Peaks that grow call for a lower learning rate or a lower max_grad_norm.",
        "norm",
        is_log=True,
    ),
    _Curve("lr", "Learning rate", "The schedule of the run.", "learning rate", has_noise=False),
)

_SIDES = (
    (
        "rewards",
        "Rewards of both sides",
        "Good: chosen stays at or above 0 while rejected falls. If both fall, the policy gives up the chosen responses "
        "as well.",
        "reward",
    ),
    (
        "logps",
        "Log-probabilities of both sides",
        "Good: chosen stays level or rises, rejected falls. The sum over a response, in nats.",
        "log-probability",
    ),
)


def points_per_line(runs: Sequence[RunFiles]) -> int:
    """Limit of points per line: the page must stay small however many runs it shows."""
    return min(600, max(40, _MAX_POINTS_OF_PAGE // (_LINES_PER_RUN * len(runs))))


def curve_charts(runs: Sequence[RunFiles]) -> list[Chart]:
    """The curves that at least one of the runs has logged."""
    charts = [_two_sided(runs, *each) for each in _SIDES]
    charts[0:0] = [_one_valued(runs, curve) for curve in _CURVES[:3]]
    charts += [_one_valued(runs, curve) for curve in _CURVES[3:]]
    return [chart for chart in charts if chart.series]


def _one_valued(runs: Sequence[RunFiles], curve: _Curve) -> Chart:
    """One metric: training and validation by color in one run, by dash in several."""
    series = [
        each
        for kind, prefix in _KINDS.items()
        for run in runs
        for each in _lines_of(run, prefix + curve.metric, runs, curve, kind=kind)
    ]
    is_single = len(runs) == 1
    has_two_kinds = len({each.labels["kind"] for each in series}) > 1
    spec = line_chart(
        series,
        title=curve.unit,
        color="kind" if is_single else "run",
        dash="kind" if has_two_kinds and not is_single else None,
        order=[TRAINING, VALIDATION] if is_single else [],
        is_log=curve.is_log,
        is_percent=curve.is_percent,
        at=curve.at,
    )
    return Chart(_chart_id(curve.metric), curve.title, curve.caption, spec, series)


def _two_sided(runs: Sequence[RunFiles], metric: str, title: str, caption: str, unit: str) -> Chart:
    """Chosen and rejected on the validation pairs, or on those of training without any."""
    kind = VALIDATION if any(run.points(f"eval/{metric}/{CHOSEN}") for run in runs) else TRAINING
    series = [
        each
        for run in runs
        for side in (CHOSEN, REJECTED)
        for each in _lines_of(run, f"{_KINDS[kind]}{metric}/{side}", runs, side=side)
    ]
    is_single = len(runs) == 1
    spec = line_chart(
        series,
        title=unit,
        color="side" if is_single else "run",
        dash=None if is_single else "side",
        order=[CHOSEN, REJECTED] if is_single else [],
        at=0.0 if metric == "rewards" else None,
    )
    return Chart(_chart_id(metric), title, f"{caption} On {kind} pairs.", spec, series)


def _lines_of(
    run: RunFiles, metric: str, runs: Sequence[RunFiles], curve: _Curve | None = None, **labels: str
) -> list[Series]:
    points = run.points(metric)
    if not points:
        return []
    if curve is not None and curve.is_log:  # a logarithm has no place for 0
        points = [(step, value if value > 0 else math.nan) for step, value in points]
    parts = Parts(raw=len(runs) == 1, mean=curve is None or curve.has_noise)
    return lines(points, points_per_line(runs), {"run": run.name, **labels}, parts)


def _chart_id(metric: str) -> str:
    return metric.replace("/", "-").replace("_", "-")
