"""Throughput against its limit: the same steps without padding and without waiting for the reference."""

from __future__ import annotations

from collections.abc import Sequence

from thresher.report.charts import Chart, line_chart
from thresher.report.curves import points_per_line
from thresher.report.numbers import MISSING, format_number, format_percent, format_seconds
from thresher.report.rows import Row
from thresher.report.run_files import Record, RunFiles
from thresher.report.series import Parts, lines

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
    most = points_per_line(runs)
    series = []
    for run in runs:
        limits = [(each["step"], limit) for each in run.records if (limit := useful_token_limit(each)) is not None]
        for kind, points in ((MEASURED, run.points(_RATE)), (LIMIT, limits)):
            series += lines(points, most, {"run": run.name, "rate": kind}, Parts(raw=len(runs) == 1)) if points else []
    if not series:
        return []
    is_single = len(runs) == 1
    spec = line_chart(
        series,
        title="useful tokens per second",
        color="rate" if is_single else "run",
        dash=None if is_single else "rate",
        order=[MEASURED, LIMIT] if is_single else [],
    )
    caption = (
        "Good: measured close to its limit, and level. The limit is the rate of the same steps without padding and "
        "without time for the reference."
    )
    return [Chart("throughput", "Throughput", caption, spec, series)]


def speed_rows(runs: Sequence[RunFiles]) -> list[Row]:
    """Rates, and where tokens and time went, over the whole run."""
    rows = [
        Row("useful tokens per second", [format_number(_round(_mean(run, _RATE))) for run in runs]),
        Row("pairs per second", [format_number(_mean(run, "pairs_per_second")) for run in runs]),
        Row("share of the limit", [format_percent(share_of_limit(run)) for run in runs]),
        Row("padding, share of computed tokens", [format_percent(_padding_share(run)) for run in runs]),
        Row("prompt tokens not computed twice, share of useful", [format_percent(_shared_share(run)) for run in runs]),
        Row("waiting for the reference, share of a step", [format_percent(_waiting_share(run)) for run in runs]),
        Row("time per step", [_seconds(_mean(run, "time/step")) for run in runs]),
        Row("time of all evaluations", [_seconds(_sum(run, "time/evaluate")) for run in runs]),
        Row("peak memory of the process", [_gigabytes(run, "memory/peak_rss_gb") for run in runs]),
        Row("peak memory of the GPU", [_gigabytes(run, "memory/peak_cuda_allocated_gb") for run in runs]),
    ]
    return [row for row in rows if any(cell != MISSING for cell in row.cells)]


def training_seconds(run: RunFiles) -> float | None:
    """Time of all logged steps; steps between two logs take the time of the later one."""
    points, total, last = run.points("time/step"), 0.0, 0
    for step, seconds in points:
        total += seconds * (step - last)
        last = step
    return total if points else None


def share_of_limit(run: RunFiles) -> float | None:
    """Mean of measured rate over limit."""
    shares = [
        each[_RATE] / limit for each in run.records if (limit := useful_token_limit(each)) is not None and _RATE in each
    ]
    return sum(shares) / len(shares) if shares else None


def _mean(run: RunFiles, metric: str) -> float | None:
    values = [value for _, value in run.points(metric)]
    return sum(values) / len(values) if values else None


def _sum(run: RunFiles, metric: str) -> float | None:
    values = [value for _, value in run.points(metric)]
    return sum(values) if values else None


def _padding_share(run: RunFiles) -> float | None:
    useful, padding, shared = (_sum(run, f"tokens/{kind}") for kind in ("useful", "padding", "shared"))
    computed = (useful or 0.0) + (padding or 0.0) - (shared or 0.0)
    return padding / computed if padding is not None and computed > 0 else None


def _shared_share(run: RunFiles) -> float | None:
    useful, shared = _sum(run, "tokens/useful"), _sum(run, "tokens/shared")
    return shared / useful if useful and shared is not None else None


def _waiting_share(run: RunFiles) -> float | None:
    waited, seconds = _sum(run, "time/wait_reference"), _sum(run, "time/step")
    return waited / seconds if seconds and waited is not None else None


def _round(value: float | None) -> float | None:
    return None if value is None else round(value)


def _seconds(value: float | None) -> str:
    return MISSING if value is None else format_seconds(value)


def _gigabytes(run: RunFiles, metric: str) -> str:
    value = run.last(metric)
    return MISSING if value is None else f"{value:.2f} GB"
