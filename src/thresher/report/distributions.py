"""Before and after: rewards, probabilities and lengths of single pairs, and of sampled answers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from thresher.report.charts import Chart, distribution_chart, scatter_chart
from thresher.report.curves import CHOSEN, REJECTED
from thresher.report.run_files import Record, RunFiles
from thresher.report.series import Series, Values, histograms, rounded

_EQUAL = 0.01  # margins below this share of their later spread are those of equal models
_POLICY, _REFERENCE = "policy, after training", "reference, before training"


def distribution_charts(runs: Sequence[RunFiles]) -> list[Chart]:
    """The distributions that the runs have written values for."""
    charts = [_margins(runs), _probabilities(runs), _answer_lengths(runs), _margins_by_length(runs)]
    return [chart for chart in charts if chart.series]


def _margins(runs: Sequence[RunFiles]) -> Chart:
    """One run: the first evaluation against the last. Several: the last of each."""
    is_single, note = len(runs) == 1, ""
    samples = [
        ({"run": run.name, "evaluation": f"step {record['step']:,}"}, _margin(record))
        for run in runs
        for record in (_first_and_last(run) if is_single else run.eval_pairs[-1:])
    ]
    if is_single and len(samples) > 1 and np.abs(samples[0][1]).max(initial=0.0) < _EQUAL * samples[1][1].std():
        note = f" At {samples[0][0]['evaluation']} the policy was the reference, and all margins were 0."
        del samples[0]
    series = histograms(samples)
    return Chart(
        "margin-distribution",
        "Reward margin of each pair" + (", first and last evaluation" if len(samples) > 1 and is_single else ""),
        "Good: after training most pairs lie right of 0, where the model ranks them as the data does. If a few pairs "
        f"lie far right and the others at 0, few pairs carry the mean.{note}",
        distribution_chart(
            series, title="chosen minus rejected reward", color="evaluation" if is_single else "run", at=0.0
        ),
        series,
    )


def _probabilities(runs: Sequence[RunFiles]) -> Chart:
    """Change of the log-probability per token against the reference, at the last evaluation."""
    is_single = len(runs) == 1
    series = histograms(
        ({"run": run.name, "side": side}, _change_per_token(run.eval_pairs[-1], side))
        for run in runs
        if run.eval_pairs
        for side in ((CHOSEN, REJECTED) if is_single else (CHOSEN,))
    )
    return Chart(
        "probability-distribution",
        f"Change of probability of {'responses' if is_single else 'chosen responses'}",
        "Good: chosen responses lie at or right of 0, rejected ones to the left. If chosen responses lie left of 0 "
        "too, probability has moved to texts that are in neither (likelihood displacement). Log-probability per token, "
        "policy minus reference.",
        distribution_chart(series, title="change in nats per token", color="side" if is_single else "run", at=0.0),
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
        distribution_chart(series, title="words per answer", color="answers" if is_single else "run"),
        series,
    )


def _margins_by_length(runs: Sequence[RunFiles]) -> Chart:
    """Margins over the difference of lengths at the last evaluation, with their correlation."""
    series, correlations = [], []
    for run in runs:
        if not run.eval_pairs:
            continue
        record = run.eval_pairs[-1]
        difference, margin = _difference(record, "lengths"), _margin(record)
        if len(difference) != len(margin):
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
        scatter_chart(series, x="chosen minus rejected length (tokens)", y="reward margin", color="run"),
        series,
    )


def newest_samples(run: RunFiles) -> list[Record]:
    """The samples of the last evaluation that has any."""
    last = max((each["step"] for each in run.samples), default=None)
    return [each for each in run.samples if each["step"] == last]


def column(record: Record, name: str) -> Values:
    """One value of each pair of an evaluation; empty if the record lacks it."""
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


def _first_and_last(run: RunFiles) -> list[Record]:
    return [run.eval_pairs[0], run.eval_pairs[-1]] if len(run.eval_pairs) > 1 else list(run.eval_pairs)


def _margin(record: Record) -> Values:
    return _difference(record, "rewards")


def _difference(record: Record, name: str) -> Values:
    chosen, rejected = column(record, f"{name}/{CHOSEN}"), column(record, f"{name}/{REJECTED}")
    return chosen - rejected if len(chosen) == len(rejected) else np.zeros(0)


def _change_per_token(record: Record, side: str) -> Values:
    policy, reference = column(record, f"logps/{side}"), column(record, f"reference_logps/{side}")
    lengths = column(record, f"lengths/{side}")
    if not len(policy) == len(reference) == len(lengths):
        return np.zeros(0)  # a loss without a reference
    return (policy - reference) / np.maximum(lengths, 1.0)
