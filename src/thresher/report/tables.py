"""The parts of a report besides charts: tables with one column per run, and the records of runs.

Records are samples, health events, recoveries, skipped steps and data reports. The limit of throughput is for
the same steps without padding or waiting.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from thresher.data.example import UNITS
from thresher.data.prepare.report import PrepareReport, percentile_names
from thresher.observability.health.history import pairs_before_comparison
from thresher.report.charts import Chart, line_chart
from thresher.report.curves import CHOSEN, newest_samples, run_lines, side_names
from thresher.report.run_files import Record, RunFiles, kind_of, unit_of


class TableRow(NamedTuple):
    """A heading and one text per run."""

    heading: str
    cells: list[str]
    differs: bool = False  # between the compared runs


MISSING = "–"  # noqa: RUF001  # a dash in a table


def format_number(value: object) -> str:
    """Format a value with four significant digits; texts stay as they are, and None is a dash."""
    if value is None:
        return MISSING
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int) or (value.is_integer() and abs(value) < 1e15):
        return f"{int(value):,}"
    if not math.isfinite(value) or not 1e-4 <= abs(value) < 1e9:
        return f"{value:.3g}"
    digits = max(0, 3 - math.floor(math.log10(abs(value))))
    return f"{value:,.{digits}f}"


def format_percent(share: float | None) -> str:
    return MISSING if share is None else f"{share:.1%}".replace("%", " %")


def format_seconds(seconds: float | None) -> str:
    """Format a duration with its two largest units."""
    if seconds is None:
        return MISSING
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,} h {minutes} min"


def format_size(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:.1f} MB"


MEASURED, LIMIT = "measured", "limit"
_RATE = "useful_tokens_per_second"


def useful_token_limit(record: Record) -> float | None:
    """Useful tokens per second if no step waited for the reference and no padding was computed.

    Padding is taken to cost as much per token as the tokens that are used. None if the record lacks what it needs.
    """
    useful, seconds = record.get("tokens/useful"), record.get("time/step")
    if not useful or not seconds:
        return None
    padding, shared = record.get("tokens/padding", 0), record.get("tokens/shared", 0)
    busy = (seconds - record.get("time/wait_reference", 0.0)) * (1 - padding / (useful + padding - shared))
    return float(useful / busy) if busy > 0 else None


def speed_charts(runs: Sequence[RunFiles]) -> list[Chart]:
    """Measured rate and limit over the steps."""
    series = []
    for run in runs:
        limits = [(each["step"], limit) for each in run.records if (limit := useful_token_limit(each)) is not None]
        for kind, points in ((MEASURED, run.points(_RATE)), (LIMIT, limits)):
            series += run_lines(points, runs, {"run": run.name, "rate": kind})
    if not series:
        return []
    title, is_single = "useful tokens per second", len(runs) == 1
    spec = line_chart(series, title=title, label="rate", order=[MEASURED, LIMIT], is_single=is_single)
    caption = (
        "Good: measured close to its limit, and level. The limit is the rate of the same steps without padding and "
        "without time for the reference."
    )
    return [Chart("throughput", "Throughput", caption, spec, series)]


def speed_rows(runs: Sequence[RunFiles]) -> list[TableRow]:
    """Rates, and where tokens and time went, over the whole run."""
    columns = [_speed(run, unit_of(runs)) for run in runs]
    rows = [TableRow(heading, [column[heading] for column in columns]) for heading in columns[0]]
    return [row for row in rows if any(cell != MISSING for cell in row.cells)]


def _speed(run: RunFiles, unit: str) -> dict[str, str]:
    useful, padding, shared = (_sum(run, f"tokens/{kind}") for kind in ("useful", "padding", "shared"))
    computed = (useful or 0.0) + (padding or 0.0) - (shared or 0.0)
    rate = _mean(run, _RATE)
    limits = [(each, limit) for each in run.records if (limit := useful_token_limit(each)) is not None]
    shares = [each[_RATE] / limit for each, limit in limits if _RATE in each]
    return {
        "useful tokens per second": format_number(None if rate is None else round(rate)),
        f"{unit} per second": format_number(_mean(run, "pairs_per_second")),
        "share of the limit": _format_share(sum(shares), len(shares)),  # mean of measured rate over limit
        "padding, share of computed tokens": _format_share(padding, max(0.0, computed)),
        "prompt tokens not computed twice, share of useful": _format_share(shared, useful),
        "waiting for the reference, share of a step": _format_share(
            _sum(run, "time/wait_reference"), _sum(run, "time/step")
        ),
        "time per step": format_seconds(_mean(run, "time/step")),
        "time of all evaluations": format_seconds(_sum(run, "time/evaluate")),
        "peak memory of the process": _gigabytes(run, "memory/peak_rss_gb"),
        "peak memory of the GPU": _gigabytes(run, "memory/peak_cuda_allocated_gb"),
    }


def _training_seconds(run: RunFiles) -> float | None:
    """Time of all logged steps; steps between two logs take the time of the later one."""
    points, total, last = run.points("time/step"), 0.0, 0
    for step, seconds in points:
        total += seconds * (step - last)
        last = step
    return total if points else None


def _mean(run: RunFiles, metric: str) -> float | None:
    values = [value for _, value in run.points(metric)]
    return sum(values) / len(values) if values else None


def _sum(run: RunFiles, metric: str) -> float | None:
    values = [value for _, value in run.points(metric)]
    return sum(values) if values else None


def _format_share(part: float | None, whole: float | None) -> str:
    return MISSING if part is None or not whole else format_percent(part / whole)


def _gigabytes(run: RunFiles, metric: str) -> str:
    value = run.last(metric)
    return MISSING if value is None else f"{value:.2f} GB"


# where a run is stored says nothing about what it does, and differs for every run
_PLACES = ("output_dir", "logging_dir")


def outcome_rows(runs: Sequence[RunFiles]) -> list[TableRow]:
    """The outcome of the runs: progress, and the first and last evaluation, or the first and last logged steps."""
    rows = [TableRow("steps", [_progress(run) for run in runs])]
    for heading, metric, is_percent in (
        ("reward accuracy", "rewards/accuracies", True),
        ("loss", "loss", False),
        ("reward margin", "rewards/margins", False),
        (f"{side_names(runs)[CHOSEN]} log-probability", "logps/chosen", False),
        ("log ratio on the data (nats)", "kl", False),
        ("win rate", "samples/win_rate", True),
        ("win rate at equal lengths", "samples/win_rate_length_controlled", True),
        ("reward of answers", "samples/reward", False),
        ("KL on answers (nats)", "samples/kl", False),
        ("length of answers (tokens)", "samples/lengths/policy", False),
        ("repeated phrases in answers", "samples/repetition/policy", True),
        ("answers that ended", "samples/ended/policy", True),
    ):
        cells = [_first_to_last(run, metric, is_percent=is_percent) + _interval(run, metric) for run in runs]
        if any(cell != MISSING for cell in cells):
            rows.append(TableRow(heading, cells))
    rows.append(TableRow("training time", [format_seconds(_training_seconds(run)) for run in runs]))
    for heading, records in (
        ("health events", [[each for each in run.health if "rule" in each] for run in runs]),
        ("recoveries", [run.recoveries for run in runs]),
        ("skipped steps", [run.skipped for run in runs]),
    ):
        if any(records):
            rows.append(TableRow(heading, [format_number(len(each)) for each in records]))
    return rows


def verdict(run: RunFiles) -> str:
    """One sentence that says what a run gained."""
    name = "Reward accuracy"
    where, values = _first_and_last(run, "rewards/accuracies")
    if values is None:  # labels have none
        name = "The reward margin"
        where, values = _first_and_last(run, "rewards/margins")
    if values is None:
        return f"{_progress(run)}."
    change = "rose" if values[1] > values[0] else "fell" if values[1] < values[0] else "stayed"
    first, last = map(format_percent if name == "Reward accuracy" else format_number, values)
    from_to = f"at {first}" if change == "stayed" else f"from {first} to {last}"
    sentence = f"{_progress(run)}. {name} on {where} {unit_of([run])} {change} {from_to}"
    _, chosen = _first_and_last(run, "logps/chosen")
    if chosen is None:
        return f"{sentence}."
    difference = chosen[1] - chosen[0]
    moved, side = "rose" if difference > 0 else "fell", side_names([run])[CHOSEN]
    nats = format_number(abs(difference))
    return f"{sentence}; the log-probability of {side} responses {moved} by {nats} nats."


def _first_to_last(run: RunFiles, metric: str, *, is_percent: bool) -> str:
    """A metric at the first and the last evaluation, or at training steps if there is no evaluation."""
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


def fact_rows(runs: Sequence[RunFiles]) -> list[TableRow]:
    """What was run: model, data, loss and so on; facts in which the runs differ come first."""
    return sorted(compare([run.section("facts") for run in runs]), key=lambda row: not row.differs)


def config_rows(runs: Sequence[RunFiles], defaults: Mapping[str, Any]) -> list[TableRow]:
    """Settings in which the runs differ; for a single run, settings that are not the default."""
    flat = [flatten(run.config) for run in runs]
    if len(runs) > 1:
        return [row for row in compare(flat) if row.differs and row.heading not in _PLACES]
    (only,), usual = flat, flatten(defaults)
    return [
        TableRow(key, [_text(value), _text(usual[key]) if key in usual else MISSING])
        for key, value in only.items()
        if key not in _PLACES and usual.get(key) != value
    ]


def metric_rows(runs: Sequence[RunFiles]) -> list[TableRow]:
    """The last value of every metric that was logged."""
    names = dict.fromkeys(name for run in runs for record in run.records for name in record if name != "step")
    return [TableRow(name, [format_number(run.last(name)) for run in runs]) for name in sorted(names)]


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested sections to dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def compare(columns: Sequence[Mapping[str, Any]]) -> list[TableRow]:
    """One row per key, with its value in each column."""
    keys = dict.fromkeys(key for column in columns for key in column)
    rows = []
    for key in keys:
        cells = [_text(column[key]) if key in column else MISSING for column in columns]
        rows.append(TableRow(str(key), cells, differs=len(set(cells)) > 1))
    return rows


def _text(value: object) -> str:
    if value is None:
        return "not set"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, bool | list | Mapping) else str(value)


# of all runs together: the page must stay small however many runs it shows
_MAX_PROMPTS, _MAX_EVENTS, _MAX_CHARS_OF_ANSWERS = 24, 600, 1_500_000
_MAX_CHARS = 3000
_MAX_PHASES = 3
_STYLES = {"warn": "warning", "stop": "error"}
NUM_SHOWN_SAMPLES = 6  # the others are folded away
Answer = tuple[str, str, str]  # who gave it, its text, remarks


def samples_of(runs: Sequence[RunFiles]) -> list[tuple[str, list[Answer]]]:
    """Answers by prompt: the reference first, then the policy of each run, at the last evaluation with samples."""
    by_prompt: dict[str, list[Answer]] = {}
    most = min(_MAX_CHARS, _MAX_CHARS_OF_ANSWERS // (_MAX_PROMPTS * (len(runs) + 1)))
    for run in runs:
        for each in newest_samples(run):
            if each.get("prompt") is None:
                continue
            answers = by_prompt.setdefault(_clipped(each["prompt"], most), [])
            if not answers and each.get("reference") is not None:
                answers.append(("reference", _clipped(each["reference"], most), _remarks(each, "reference")))
            who = f"{'policy' if len(runs) == 1 else run.name}, step {each['step']:,}"
            answers.append((who, _clipped(each.get("policy", ""), most), _remarks(each, "policy")))
    return list(by_prompt.items())[:_MAX_PROMPTS]


def _remarks(row: Record, who: str) -> str:
    """A sample's numbers; an answer's numbers start with its name, as in policy_tokens."""
    named = {key.removeprefix(f"{who}_"): value for key, value in row.items() if key.startswith(f"{who}_")}
    if who == "policy":  # the others are about the pair
        known = ("step", "prompt", "policy", "reference")
        named |= {
            key: value
            for key, value in row.items()
            if key not in known and not key.startswith(("policy_", "reference_"))
        }
    return ", ".join(
        f"{key.replace('_', ' ')} {('no', 'yes')[value] if isinstance(value, bool) else format_number(value)}"
        for key, value in named.items()
        if isinstance(value, int | float | str) and len(str(value)) < 60
    )


BENCHMARK_HEADINGS = ["benchmark", "questions", "step", "reference", "policy", "change"]


def benchmark_rows(results: Sequence[Record]) -> list[TableRow]:
    """Results of benchmarks: questions, the policy's step, reference and policy with errors, and the difference.

    The result of a model at its highest step counts. The error of a difference is that of two independent samples: both
    answer the same questions, so it is rather too large.
    """
    found: dict[str, dict[str, Record]] = {}
    for each in results:
        models, name = found.setdefault(_benchmark(each), {}), str(each.get("model"))
        if name not in models or each["step"] >= models[name]["step"]:
            models[name] = each
    rows = []
    for name, models in found.items():
        last, step = list(models.values())[-1], models.get("policy", {}).get("step")
        shown = [_with_error(models.get(each)) for each in ("reference", "policy")]
        if "model" in models:
            shown = [MISSING, _with_error(models["model"])]
        rows.append(TableRow(name, [*map(format_number, (last.get("num_samples"), step)), *shown, _change(models)]))
    return rows


def _benchmark(row: Record) -> str:
    """Name a metric of a task, with what else decides it."""
    parts = [f"{row.get('task')} {row.get('metric')}"]
    if row.get("filter") not in (None, "none"):
        parts.append(str(row["filter"]))
    if row.get("num_fewshot") is not None:
        parts.append(f"{row['num_fewshot']}-shot")
    if row.get("limit") is not None:
        parts.append(f"limit {row['limit']}")
    settings = row.get("settings")
    parts += [f"{key}={_text(value)}" for key, value in settings.items()] if isinstance(settings, Mapping) else []
    return ", ".join(parts)


def _with_error(row: Record | None) -> str:
    if row is None:
        return MISSING
    value, error = row.get("value"), row.get("stderr")
    return f"{value:.4f}{_plus_minus(error)}" if isinstance(value, int | float) else MISSING


def _plus_minus(error: object) -> str:
    return f" ± {error:.4f}" if isinstance(error, int | float) else ""


def _change(models: Mapping[str, Record]) -> str:
    before, after = (models.get(each, {}) for each in ("reference", "policy"))
    values, errors = ((before.get(key), after.get(key)) for key in ("value", "stderr"))
    match values:
        case (int() | float() as old, int() | float() as new):
            error = None if None in errors else math.hypot(*map(float, filter(None, errors)))
            return f"{new - old:+.4f}{_plus_minus(error)}"
    return MISSING


def health_events(runs: Sequence[RunFiles]) -> list[dict[str, str]]:
    """The events of all runs, in the order of the log; a run that was continued after a stop is one as well."""
    events = []
    for run in runs:
        for each in run.health[: _max_events(runs)]:
            changes, evidence = each.get("continued"), each.get("evidence")
            action = str(each.get("action", "")) if changes is None else "continued"
            numbers = evidence.items() if isinstance(evidence, Mapping) else ()
            message = each.get("summary", "") if changes is None else changes
            events.append(
                {
                    "run": run.name,
                    "step": f"{each['step']:,}",
                    "rule": str(each.get("rule", "")).replace("_", " "),
                    "action": action,
                    "style": _STYLES.get(action, "note"),
                    "message": "; ".join(map(str, message)) if isinstance(message, list) else str(message),
                    "evidence": ", ".join(f"{name} {format_number(value)}" for name, value in numbers),
                    "advice": str(each.get("advice", "")),
                }
            )
    return events


def quiet_runs(runs: Sequence[RunFiles]) -> list[tuple[str, str]]:
    """The runs without events, and what that means."""
    return [(run.name, _without_events(run)) for run in runs if run.config and not run.health]


def _without_events(run: RunFiles) -> str:
    if run.config.get("health") == "off":
        return "Health is off."
    pairs_per_step, every = run.description.get("pairs_per_step"), run.config.get("logging_steps")
    if isinstance(pairs_per_step, int) and isinstance(every, int) and pairs_per_step * every > 0:
        start, seen = pairs_before_comparison(pairs_per_step * every), run.last("pairs_seen") or 0
        if seen < start:
            unit = unit_of([run]).removesuffix("s")
            return f"No events; most rules compare from {unit} {start:,} on, and the run has seen {seen:,.0f}."
    return "No events."


def recovery_rows(runs: Sequence[RunFiles]) -> list[TableRow]:
    """Restarts after failures: run, cause, step, resumed from, steps repeated, seconds, and where they went."""
    keys = ("cause", "step", "from_step", "steps_repeated", "seconds")
    return [
        TableRow(run.name, [*(format_number(each.get(key)) for key in keys), _longest_phases(each.get("phases"))])
        for run in runs
        for each in run.recoveries[: _max_events(runs)]
    ]


def _longest_phases(phases: object) -> str:
    """The phases of a restart that took longest, with their seconds."""
    if not isinstance(phases, Mapping):
        return ""
    known = [(str(phase), each) for phase, each in phases.items() if isinstance(each, int | float)]
    longest = sorted(known, key=lambda each: -each[1])[:_MAX_PHASES]
    return ", ".join(f"{phase} {each:.1f}" for phase, each in longest)


def skipped_rows(runs: Sequence[RunFiles]) -> list[TableRow]:
    """Steps without an update: run, step, reason, gradient norm, pairs."""
    return [
        TableRow(
            run.name,
            [
                format_number(each["step"]),
                str(each.get("reason", "")),
                format_number(each.get("grad_norm")),
                _pairs_of(each.get("pairs")),
            ],
        )
        for run in runs
        for each in run.skipped[: _max_events(runs)]
    ]


def _pairs_of(pairs: object) -> str:
    entries = [each for each in pairs if isinstance(each, Mapping)] if isinstance(pairs, list) else []
    places = [" ".join(str(each[name]) for name in ("source", "pair") if name in each) for each in entries[:5]]
    faults = [each.get("fault", "not known") for each in entries[:5]]
    named = ", ".join(f"{place} ({fault})" for place, fault in zip(places, faults, strict=True))
    return named + (f" and {len(entries) - 5} more" if len(entries) > 5 else "")


def data_reports(runs: Sequence[RunFiles]) -> list[dict[str, Any]]:
    """The reports of the preparations; runs on the same data share one."""
    found: dict[str, dict[str, Any]] = {}
    for run in runs:
        for role, title in (("train", "Training"), ("validation", "Validation")):
            section = run.section("data").get(role)
            if not isinstance(section, Mapping):
                continue
            parts = section.get("parts")
            for name, part in (parts if isinstance(parts, Mapping) else {"": section}).items():
                if not isinstance(part, Mapping):
                    continue
                key = json.dumps([role, name, part], sort_keys=True, default=str)
                if key not in found:
                    of_part = f", {name}" if name else ""
                    heading = f"{title} {UNITS[kind_of(part)]}{of_part}: {format_number(part.get('pairs'))}"
                    found[key] = {"title": heading, "runs": [], **_data_report(part.get("report"))}
                found[key]["runs"].append(run.name)
    return list(found.values())


def _data_report(values: Any) -> dict[str, Any]:
    """How the rows of a source were handled; the notes have the style of a class of the page."""
    if values is None:
        return {"notes": [("note", "held out of the training data, see its report")], "counts": []}
    try:
        report = PrepareReport.from_json(values)
    except (KeyError, TypeError, ValueError, AttributeError, AssertionError):
        return {"notes": [("warning", "the report of this data is damaged")], "counts": []}
    return {
        "counts": [TableRow(name, [f"{count:,}"]) for name, count in report.count_rows()],
        "length_names": percentile_names(),
        "lengths": [TableRow(name, [f"{value:,}" for value in each]) for name, each in report.percentiles.items()],
        "notes": [("warning" if level >= logging.WARNING else "note", line) for level, line in report.notes()],
    }


def _max_events(runs: Sequence[RunFiles]) -> int:
    return max(1, _MAX_EVENTS // len(runs))


def _clipped(text: object, max_chars: int) -> str:
    whole = str(text)
    return whole if len(whole) <= max_chars else f"{whole[:max_chars]} … ({len(whole):,} characters)"
