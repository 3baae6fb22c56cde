"""The parts of a report that list records: samples, health events, recoveries, skipped steps, data reports."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from thresher.data.prepare.report import PrepareReport, percentile_names
from thresher.observability.health.history import pairs_before_comparison
from thresher.report.curves import newest_samples
from thresher.report.run_files import Record, RunFiles
from thresher.report.tables import TableRow, format_number

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
    """A sample's numbers; the ones of one answer start with its name, as in policy_tokens."""
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
    if not isinstance(pairs_per_step, int) or not isinstance(every, int) or pairs_per_step * every <= 0:
        return "No events."
    start, seen = pairs_before_comparison(pairs_per_step * every), run.last("pairs_seen") or 0
    if seen >= start:
        return "No events."
    return f"No events; most rules compare from pair {start:,} on, and the run has seen {seen:,.0f}."


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
    named = ", ".join(f"{each.get('pair')} ({each.get('fault', 'not known')})" for each in entries[:5])
    return named + (f" and {len(entries) - 5} more" if len(entries) > 5 else "")


def data_reports(runs: Sequence[RunFiles]) -> list[dict[str, Any]]:
    """The reports of the preparations; runs on the same data share one."""
    found: dict[str, dict[str, Any]] = {}
    for run in runs:
        for role, title in (("train", "Training pairs"), ("validation", "Validation pairs")):
            section = run.data.get(role)
            if not isinstance(section, Mapping):
                continue
            key = json.dumps([role, section], sort_keys=True, default=str)
            if key not in found:
                heading = f"{title}: {format_number(section.get('pairs'))}"
                found[key] = {"title": heading, "runs": [], **_data_report(section.get("report"))}
            found[key]["runs"].append(run.name)
    return list(found.values())


def _data_report(values: Any) -> dict[str, Any]:
    """How the rows of a source were handled; the notes have the style of a class of the page."""
    if values is None:
        return {"notes": [("note", "held out of the pairs of training, see their report")], "counts": []}
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
