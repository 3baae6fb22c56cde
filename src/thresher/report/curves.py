"""The charts over steps and evaluations: what is drawn, and what good looks like."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from thresher.report import charts
from thresher.report.charts import Chart, Point, Series, Values, histograms, rounded
from thresher.report.run_files import Record, RunFiles, unit_of

TRAINING, VALIDATION = "training", "validation"
CHOSEN, REJECTED = "chosen", "rejected"
# what the sides are in runs on labelled responses
_LABELS = {CHOSEN: "desirable", REJECTED: "undesirable"}
_KINDS = {TRAINING: "", VALIDATION: "eval/"}
_MAX_POINTS_OF_PAGE = 40_000
_LINES_PER_RUN = 24


class _Curve(NamedTuple):
    """A metric over the steps, on training and on validation data. {chosen} and {rejected} stand for the sides."""

    metric: str  # its name in the log
    title: str
    caption: str
    unit: str
    is_percent: bool = False
    is_log: bool = False
    at: float | None = None  # draw a horizontal line at this value
    has_noise: bool = True
    has_sides: bool = False  # of chosen and rejected responses, on validation data if there is any


_CURVES = (
    _Curve(
        "loss",
        "Loss",
        "Good: falls, then levels off, on both training and validation data. If only the validation loss rises "
        "again, the run overfits: stop earlier, or train with a lower learning rate.",
        "loss",
    ),
    _Curve(
        "rewards/accuracies",
        "Reward accuracy",
        "Good: the share of comparisons whose chosen response has the higher reward rises well above 50 % on "
        "validation data. At 50 % the model has learned nothing.",
        "accuracy",
        is_percent=True,
        at=0.5,
    ),
    _Curve(
        "rewards/margins",
        "Reward margin",
        "Good: {chosen} minus {rejected} reward rises steadily above 0 and levels off.",
        "margin",
        at=0.0,
    ),
    _Curve(
        "rewards",
        "Rewards of both sides",
        "Good: {chosen} stays at or above 0 while {rejected} falls. If both fall, the policy gives up the {chosen} "
        "responses too.",
        "reward",
        at=0.0,
        has_sides=True,
    ),
    _Curve(
        "logps",
        "Log-probabilities of both sides",
        "Good: {chosen} stays level or rises, {rejected} falls. The sum over a response, in nats.",
        "log-probability",
        has_sides=True,
    ),
    _Curve(
        "kl",
        "Log ratio on the data",
        "Good: stays small. log(policy / reference) of the responses of the data, mean of all, in nats per response. "
        "It falls where {rejected} responses become less likely; far below 0, the policy has become unlikely "
        "to give any response of the data.",
        "log ratio (nats)",
        at=0.0,
    ),
    _Curve(
        "kto/z0",
        "KTO's reference point",
        "Good: stays small. The log ratio above which a response counts as improved: an estimate of the KL divergence "
        "from answers to other prompts, at least 0. If it grows, the policy moves away from the reference everywhere; "
        "raise beta or lower the learning rate.",
        "log ratio (nats)",
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


def curve_charts(runs: Sequence[RunFiles]) -> list[Chart]:
    """The curves that at least one of the runs has logged."""
    return [chart for chart in (_curve_chart(runs, curve) for curve in _CURVES) if chart.series]


def _curve_chart(runs: Sequence[RunFiles], curve: _Curve) -> Chart:
    """A metric of training and validation data, or of chosen and rejected responses."""
    sides = side_names(runs)
    label, caption = "kind", curve.caption.format(**sides)
    names = {kind: f"{prefix}{curve.metric}" for kind, prefix in _KINDS.items()}
    if curve.has_sides:
        kind = VALIDATION if any(run.points(f"eval/{curve.metric}/{CHOSEN}") for run in runs) else TRAINING
        label, caption = "side", f"{caption} On {kind} data."
        names = {name: f"{_KINDS[kind]}{curve.metric}/{side}" for side, name in sides.items()}
    series = []
    for value, name in names.items():
        for run in runs:
            points = run.points(name)
            if curve.is_log:  # a logarithm has no place for 0
                points = [(step, each if each > 0 else math.nan) for step, each in points]
            series += run_lines(points, runs, {"run": run.name, label: value}, has_noise=curve.has_noise)
    spec = charts.line_chart(
        series,
        title=curve.unit,
        label=label,
        order=list(names),
        is_single=len(runs) == 1,
        is_log=curve.is_log,
        is_percent=curve.is_percent,
        at=curve.at,
    )
    return Chart(_chart_id(curve.metric), curve.title, caption, spec, series)


def side_names(runs: Sequence[RunFiles]) -> Mapping[str, str]:
    """What the sides of the runs are called."""
    return _LABELS if all(run.kind == "labels" for run in runs) else {side: side for side in _LABELS}


def run_lines(
    points: Sequence[Point], runs: Sequence[RunFiles], labels: Mapping[str, str], *, has_noise: bool = True
) -> list[Series]:
    """The line of one of the runs; the raw values of several would hide each other."""
    if not points:
        return []
    # the page must stay small however many runs it shows
    max_points = min(600, max(40, _MAX_POINTS_OF_PAGE // (_LINES_PER_RUN * len(runs))))
    return charts.lines(points, max_points, labels, raw=len(runs) == 1, mean=has_noise)


def _chart_id(metric: str) -> str:
    return metric.replace("/", "-").replace("_", "-")


# measured on answers of the policy if a run has them, else the log ratio on the responses of the data
_DISTANCES = {"samples/kl": ("KL", "KL on answers (nats)"), "eval/kl": ("log ratio", "log ratio on the data (nats)")}
_GAINS = (
    ("samples/win_rate", "Win rate", "win rate", True),
    ("samples/reward", "Reward of answers", "reward", False),
    ("eval/rewards/accuracies", "Reward accuracy", "accuracy", True),
    ("eval/rewards/margins", "Reward margin", "margin", False),
)
_CAPTION = (
    "Good: high and near 0. Each point is an evaluation, the large one the last. Of two runs at the same height, "
    "prefer the one nearer to the reference."
)


def frontier_charts(runs: Sequence[RunFiles]) -> list[Chart]:
    """One chart per measure of gain that a run has logged together with its distance."""
    distance = next((each for each in _DISTANCES if any(run.points(each) for run in runs)), None)
    if distance is None:
        return []
    name, label = _DISTANCES[distance]
    found = []
    for gain, title, unit, is_percent in _GAINS:
        series = [each for run in runs if (each := _path(run, distance, gain)) is not None]
        if series:
            is_beta_dependent = gain == "eval/rewards/margins" and len(runs) > 1
            note = " Margins of runs with different beta are not comparable." if is_beta_dependent else ""
            spec = charts.path_chart(series, x=label, y=unit, color="run", is_percent=is_percent)
            found.append(Chart(f"frontier-{_chart_id(gain)}", f"{title} against {name}", _CAPTION + note, spec, series))
    return found


def _path(run: RunFiles, distance: str, gain: str) -> Series | None:
    distances, gains = dict(run.points(distance)), dict(run.points(gain))
    steps = [
        step for step in distances if step in gains and math.isfinite(distances[step]) and math.isfinite(gains[step])
    ]
    if not steps:
        return None
    columns: dict[str, list[float | None]] = {
        "x": [rounded(distances[step]) for step in steps],
        "y": [rounded(gains[step]) for step in steps],
        "step": [float(step) for step in steps],
        "is_end": [float(step == steps[-1]) for step in steps],
    }
    return Series({"run": run.name}, columns)


_EQUAL = 0.01  # two models are equal if their margins are below this share of their later spread
_POLICY, _REFERENCE = "policy, after training", "reference, before training"


def distribution_charts(runs: Sequence[RunFiles]) -> list[Chart]:
    """The distributions that the runs logged values for."""
    candidates = [
        _margins(runs),
        _rewards_of_labels(runs),
        _rewards_by_rank(runs),
        _probabilities(runs),
        _answer_lengths(runs),
        _margins_by_length(runs),
    ]
    return [chart for chart in candidates if chart.series]


def _evaluations(runs: Sequence[RunFiles]) -> list[tuple[Mapping[str, str], Record]]:
    """One run: the first evaluation and the last. Several: the last of each."""
    return [
        ({"run": run.name, "evaluation": f"step {record['step']:,}"}, record)
        for run in runs
        for at, record in enumerate(run.eval_pairs)
        if at == len(run.eval_pairs) - 1 or (len(runs) == 1 and at == 0)
    ]


def _margins(runs: Sequence[RunFiles]) -> Chart:
    is_single, note = len(runs) == 1, ""
    found = [(labels, _margin(record)) for labels, record in _evaluations(runs)]
    samples = [(labels, margins) for labels, margins in found if len(margins)]
    if is_single and len(samples) > 1 and np.abs(samples[0][1]).max(initial=0.0) < _EQUAL * samples[1][1].std():
        note = f" At {samples[0][0]['evaluation']} the policy was the reference, and all margins were 0."
        del samples[0]
    series = histograms(samples)
    unit = unit_of(runs).removesuffix("s")
    return Chart(
        "margin-distribution",
        f"Reward margin of each {unit}" + (", first and last evaluation" if len(samples) > 1 and is_single else ""),
        f"Good: after training most {unit}s lie right of 0, where the model ranks them as the data does. If a few "
        f"{unit}s lie far right and the others at 0, few {unit}s carry the mean.{note}",
        charts.distribution_chart(
            series,
            title="best minus mean other reward" if unit == "list" else "chosen minus rejected reward",
            color="evaluation" if is_single else "run",
            at=0.0,
        ),
        series,
    )


def _rewards_of_labels(runs: Sequence[RunFiles]) -> Chart:
    """Rewards of labelled responses, at the last evaluation."""
    is_single = len(runs) == 1
    series = histograms(
        ({"run": run.name, "side": name}, _of_side(run.eval_pairs[-1], "rewards", side))
        for run in runs
        if run.eval_pairs and "label" in run.eval_pairs[-1]
        for side, name in _LABELS.items()
        if is_single or side == CHOSEN
    )
    return Chart(
        "reward-distribution",
        f"Rewards of {'' if is_single else 'desirable '}responses",
        "Good: desirable responses lie right of 0 and of undesirable ones. If both lie on the same side of 0, the "
        "policy changes the probability of every response alike.",
        charts.distribution_chart(
            series, title="reward", color="side" if is_single else "run", order=list(_LABELS.values()), at=0.0
        ),
        series,
    )


def _rewards_by_rank(runs: Sequence[RunFiles]) -> Chart:
    """Mean reward of the best response of each list, of the second, and so on."""
    series = []
    for labels, record in _evaluations(runs):
        ranks = [each[np.isfinite(each)] for each in _by_rank(record)]
        points = [(float(rank), float(each.mean())) for rank, each in enumerate(ranks, start=1) if len(each)]
        series += charts.lines(points, len(points), labels, raw=False, mean=False) if points else []
    return Chart(
        "reward-by-rank",
        "Mean reward by rank",
        "Good: falls from the best response, rank 1, to the last. Ranks at the same height are not told apart. Lists "
        "may differ in length: few of them may have the last ranks.",
        charts.line_chart(
            series,
            title="mean reward",
            label="evaluation",
            order=[each.labels["evaluation"] for each in series],
            is_single=len(runs) == 1,
            x="rank",
        ),
        series,
    )


def _probabilities(runs: Sequence[RunFiles]) -> Chart:
    """Change of the log-probability per token against the reference, at the last evaluation."""
    is_single, names, unit = len(runs) == 1, side_names(runs), unit_of(runs)
    chosen, rejected = names.values()
    series = histograms(
        ({"run": run.name, "side": name}, _change_per_token(run.eval_pairs[-1], side))
        for run in runs
        if run.eval_pairs
        for side, name in names.items()
        if is_single or side == CHOSEN
    )
    note = " Of a list, the best response is the chosen one and the worst the rejected one." if unit == "lists" else ""
    return Chart(
        "probability-distribution",
        f"Change of probability of {'' if is_single else f'{chosen} '}responses",
        f"Good: {chosen} responses lie at or right of 0, {rejected} ones to the left. If {chosen} responses lie left "
        "of 0 too, probability has moved to texts that are in neither (likelihood displacement). Log-probability per "
        f"token, policy minus reference.{note}",
        charts.distribution_chart(
            series, title="change in nats per token", color="side" if is_single else "run", at=0.0
        ),
        series,
    )


def _answer_lengths(runs: Sequence[RunFiles]) -> Chart:
    """Words of the sampled answers of policy and reference, at the last evaluation with samples."""
    is_single = len(runs) == 1
    samples: list[tuple[Mapping[str, str], Values]] = []
    for run in runs:
        newest = newest_samples(run)
        for name, key in ((_REFERENCE, "reference"), (_POLICY, "policy")):
            if is_single or key == "policy":
                words = [len(str(each[key]).split()) for each in newest if each.get(key) is not None]
                samples.append(({"run": run.name, "answers": name}, np.array(words, dtype=np.float64)))
    series = histograms(samples)
    return Chart(
        "answer-length-distribution",
        "Length of answers, before and after" if is_single else "Length of answers",
        "Good: about the length of the reference's answers. If they grow much longer while accuracy hardly changes, "
        "the model exploits length.",
        charts.distribution_chart(series, title="words per answer", color="answers" if is_single else "run"),
        series,
    )


def _margins_by_length(runs: Sequence[RunFiles]) -> Chart:
    """Margins over the difference of lengths at the last evaluation, with their correlation."""
    series, correlations = [], []
    for run in runs:
        if not run.eval_pairs:
            continue
        record = run.eval_pairs[-1]
        difference, margin = _difference(record, "lengths"), _difference(record, "rewards")
        if not len(margin) or len(difference) != len(margin):
            continue
        columns = {"x": [rounded(x) for x in difference.tolist()], "y": [rounded(y) for y in margin.tolist()]}
        series.append(Series({"run": run.name}, columns))
        if (correlation := correlate(difference, margin)) is not None:
            correlations.append(f"{correlation:.2f}" + ("" if len(runs) == 1 else f" ({run.name})"))
    shown = f" Correlation: {', '.join(correlations)}." if correlations else ""
    return Chart(
        "margin-by-length",
        "Reward margin against length",
        "Good: a flat line. If margins rise with the difference of lengths, the reward follows length rather than "
        f"content.{shown}",
        charts.scatter_chart(series, x="chosen minus rejected length (tokens)", y="reward margin", color="run"),
        series,
    )


def newest_samples(run: RunFiles) -> list[Record]:
    """The samples of the last evaluation that has any."""
    last = max((each["step"] for each in run.samples), default=None)
    return [each for each in run.samples if each["step"] == last]


def column(record: Record, name: str) -> Values:
    """One value of each example of an evaluation; empty if the record lacks it."""
    values = record.get(name)
    try:
        return np.array([float(value) for value in values or ()])
    except (TypeError, ValueError):
        return np.zeros(0)


def correlate(one: Values, other: Values) -> float | None:
    """Pearson's correlation; None if it is not defined."""
    if len(one) != len(other) or len(one) < 3 or not (one.std() and other.std()):
        return None
    correlation = float(np.corrcoef(one, other)[0, 1])
    return correlation if math.isfinite(correlation) else None


def _difference(record: Record, name: str) -> Values:
    chosen, rejected = column(record, f"{name}/{CHOSEN}"), column(record, f"{name}/{REJECTED}")
    return chosen - rejected if len(chosen) == len(rejected) else np.zeros(0)


def _margin(record: Record) -> Values:
    """Chosen minus rejected reward; of a list, the best response's reward minus the mean of the others'."""
    ranks = _by_rank(record)
    if len(ranks) < 2:
        return _difference(record, "rewards")
    others = np.array(ranks[1:])
    is_present = np.isfinite(others)
    means: Values = np.where(is_present, others, 0.0).sum(axis=0) / np.maximum(1, is_present.sum(axis=0))
    return ranks[0] - means


def _by_rank(record: Record) -> list[Values]:
    """The rewards of the best response of each list, of the second, and so on; NaN where a list has fewer."""
    best = column(record, "rewards/rank_1")
    found = [best] if len(best) else []
    while found and len(worse := column(record, f"rewards/rank_{len(found) + 1}")) == len(best):
        found.append(worse)
    return found


def _of_side(record: Record, name: str, side: str) -> Values:
    """A value of the chosen or rejected responses; of labelled ones, those with that label."""
    labels = column(record, "label")
    if not len(labels):
        return column(record, f"{name}/{side}")
    values = column(record, f"{name}/response")
    return values[(labels > 0.5) == (side == CHOSEN)] if len(values) == len(labels) else np.zeros(0)


def _change_per_token(record: Record, side: str) -> Values:
    policy, reference, lengths = (_of_side(record, name, side) for name in ("logps", "reference_logps", "lengths"))
    if not len(policy) == len(reference) == len(lengths):
        return np.zeros(0)  # a loss without a reference
    return (policy - reference) / np.maximum(lengths, 1.0)
