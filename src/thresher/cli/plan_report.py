"""The result of `thresher plan` as tables and bars, or as JSON."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import filesize
from rich.console import Console
from rich.table import Table
from rich.text import Text

from thresher.cli.plan_calibration import print_calibration
from thresher.cli.plan_simulation import simulation_json, simulation_table, wait_lines
from thresher.cli.terminal import result_console
from thresher.errors import unusable_path
from thresher.plan.compute import LINK_RATE, MEMORY_RATE, PRODUCT_RATES
from thresher.plan.memory import RESERVED
from thresher.plan.search import changes_that_help
from thresher.plan.traffic import AXES_OF_MESSAGES
from thresher.redact import escape_control_chars, redact_text

if TYPE_CHECKING:
    from thresher.plan.axes import Proposal
    from thresher.plan.calibrate import Calibration
    from thresher.plan.estimate import Estimate, StageEstimate
    from thresher.plan.simulate.run import SimulatedRank

_BAR_WIDTH = 60
_COLORS = {
    "weights": "blue",
    "gradients": "cyan",
    "optimizer": "magenta",
    "reference": "bright_black",
    "gather_buffers": "yellow",
    "activations": "green",
    "lm_head": "red",
}
_LETTERS = {name: name[0].upper() for name in _COLORS} | {"gather_buffers": "B"}
_COMPILED = {"nothing": "nothing", "functions": "norms and activations", "layers": "layers"}
_MOST_CHANGES = 6
_SAVED_WIDTH = 120


@dataclass(frozen=True)
class PlanReport:
    """What a plan shows. simulated, measured: ranks and real steps, if they were requested."""

    estimate: Estimate
    layouts: Sequence[Proposal]
    simulated: Sequence[SimulatedRank] = ()
    measured: Calibration | None = None


def print_plan(report: PlanReport) -> None:
    _print(report, result_console())


def save_plan(report: PlanReport, file: Path) -> None:
    """Write the report as HTML or SVG, in the colors of the terminal."""
    console = Console(record=True, width=_SAVED_WIDTH, file=io.StringIO(), highlight=False, force_terminal=True)
    _print(report, console)
    try:
        if file.suffix == ".svg":
            console.save_svg(str(file), title="thresher plan")
        else:
            console.save_html(str(file))
    except OSError as error:
        raise unusable_path(str(file), error.strerror) from None


def _print(report: PlanReport, console: Console) -> None:
    estimate, simulated = report.estimate, report.simulated

    def say(line: str) -> None:
        console.print(Text(escape_control_chars(redact_text(line))), soft_wrap=not console.record)

    for line in _facts(estimate):
        say(line)
    say("\nmemory per GPU at the peak of a step")
    console.print(_memory_table(estimate))
    for stage in estimate.stages:
        console.print(_bar(stage, estimate.cluster.gpu.memory), soft_wrap=True)
    if any(stage.wire_bytes for stage in estimate.stages):
        say("\nbytes that a GPU sends per step")
        console.print(_traffic_table(estimate))
    say("\nseconds per step, by roofline")
    console.print(_time_table(estimate))
    if simulated:
        say("\nsimulated with tensors that have no values: a step of the longest and of median micro-batches")
        console.print(simulation_table(simulated))
        for line in ("the host waits for the device in", *wait_lines(simulated)):
            say(line)
    for line in (*_conclusion(estimate), *_layout_lines(estimate, report.layouts)):
        say(line)
    if report.measured is not None:
        print_calibration(estimate, report.measured, console)


def _facts(estimate: Estimate) -> list[str]:
    workload, shape, cluster = estimate.workload, estimate.shape, estimate.cluster
    assumed = " (assumed)" if workload.is_assumed else ""
    plan = workload.plan
    useful = workload.useful_per_step
    notes = [] if estimate.note is None else [f"strategy: {estimate.note}"]
    if not cluster.gpu.has_bf16 and estimate.config.actor_train.model_args.dtype == "bf16":
        notes.append(
            f"precision: {cluster.gpu.name} has no bf16, and the rates are those of fp16; set "
            "actor_train.model_args.dtype=fp16"
        )
    return [
        *notes,
        f"model: {estimate.parts.policy_path}, {shape.num_parameters:,} parameters, {shape.num_trained:,} trained",
        f"GPUs: {cluster.num_gpus} x {cluster.gpu.name}, {_axes(estimate)}",
        f"pairs: {estimate.pairs.source}",
        f"step: {plan.pairs_per_step:,} pairs, {useful:,.0f} useful tokens{assumed}, "
        f"micro-batches per data-parallel rank: {estimate.memory_settings.micro_batches}, the largest of "
        f"{workload.largest.total:,} tokens",
        f"epoch: {plan.num_pairs:,} pairs, {useful * plan.steps_per_epoch:,.0f} useful tokens, "
        f"{plan.steps_per_epoch:,} steps{assumed}; the run has {plan.num_steps:,} steps",
        f"layout: {workload.layout}, {workload.rows_per_step:,.0f} rows per step, {workload.saved_rows:.0%} fewer than "
        "padded",
        f"reference: {estimate.parts.mode}",
        *_chosen_budget(estimate),
    ]


def _axes(estimate: Estimate) -> str:
    return ", ".join(f"{name} {size}" for name, size in vars(estimate.dims).items() if size > 1) or "one process"


def _chosen_budget(estimate: Estimate) -> list[str]:
    if estimate.budget_reason is None:
        return []
    tokens = estimate.config.actor_train.training_args.max_tokens_per_micro_batch
    shown = "no limit" if tokens is None else f"{tokens:,}"
    return [f"max_tokens_per_micro_batch: auto -> {shown}, {estimate.budget_reason}"]


def _memory_table(estimate: Estimate) -> Table:
    table = Table()
    table.add_column("category")
    for stage in estimate.stages:
        table.add_column(_stage_title(stage), justify="right")
    for name in _COLORS:
        table.add_row(
            f"{_LETTERS[name]} {name.replace('_', ' ')}",
            *(_memory_cell(stage, name) for stage in estimate.stages),
        )
    table.add_section()
    table.add_row("total", *(filesize.decimal(stage.memory.total) for stage in estimate.stages))
    return table


def _memory_cell(stage: StageEstimate, name: str) -> str:
    size = stage.memory.by_category[name]
    # the peak of a step with large activations is before its first backward
    is_later = name == "gradients" and not size and stage.memory.optimizer > 0
    return "not yet" if is_later else filesize.decimal(size)


def _stage_title(stage: StageEstimate) -> str:
    return "every GPU" if stage.name == "all" else f"{stage.name} stage"


def _bar(stage: StageEstimate, capacity: float) -> Text:
    """Memory by category as a stacked bar; the scale is the GPU's memory, or the peak if it is larger."""
    scale = max(capacity, stage.memory.total) / _BAR_WIDTH
    text = Text(f"{_stage_title(stage):<13}")
    ends, end = [], 0
    for name, size in stage.memory.by_category.items():
        end += size
        ends.append((name, round(end / scale)))
    start = 0
    for name, stop in ends:
        text.append(_LETTERS[name] * (stop - start), style=_COLORS[name])
        start = max(start, stop)
    limit = round(capacity / scale)
    text.append("." * max(0, limit - start), style="dim")
    return text.append(f"| {filesize.decimal(stage.memory.total)} of {filesize.decimal(round(capacity))}")


def _traffic_table(estimate: Estimate) -> Table:
    table = Table()
    table.add_column("axis")
    table.add_column("link")
    for stage in estimate.stages:
        table.add_column(_stage_title(stage), justify="right")
    for axis in AXES_OF_MESSAGES:
        if not any(axis in stage.wire_bytes for stage in estimate.stages):
            continue
        bandwidth = estimate.cluster.bandwidth(axis, estimate.dims)
        link = "node" if bandwidth >= LINK_RATE * estimate.cluster.gpu.intra_node else "network"
        table.add_row(axis, link, *(filesize.decimal(int(s.wire_bytes.get(axis, 0))) for s in estimate.stages))
    return table


def _time_table(estimate: Estimate) -> Table:
    table = Table()
    table.add_column("work")
    for stage in estimate.stages:
        table.add_column(_stage_title(stage), justify="right")
    lines = [stage.roofline for stage in estimate.stages]
    table.add_row("matrix products", *(_range(_seconds, *r.products) for r in lines))
    table.add_row("elementwise", *(_seconds(r.elementwise) for r in lines))
    table.add_row("copies of FSDP2", *(_seconds(r.copies) for r in lines))
    table.add_row("optimizer", *(_seconds(r.optimizer) for r in lines))
    for axis in sorted({axis for r in lines for axis in r.communication} - {"step"}):
        table.add_row(f"sending, {axis}", *(_seconds(r.communication.get(axis, 0.0)) for r in lines))
    if any(r.communication for r in lines):
        table.add_row("sending that is not hidden at best", *(_seconds(r.exposed) for r in lines))
    if estimate.dims.pp > 1:
        table.add_row("pipeline bubble", *(_seconds(r.bubble) for r in lines))
    table.add_section()
    table.add_row("step", *(_range(_seconds, r.best, r.worst) for r in lines))
    return table


def _seconds(value: float) -> str:
    """Three digits, and nothing below a microsecond."""
    return f"{round(value, 6):.3g}"


def _range(show: Callable[[float], str], best: float, worst: float) -> str:
    """The worst case first: published steps of other trainers are near it."""
    return show(worst) if show(best) == show(worst) else f"{show(worst)} ({show(best)} at best)"


def _durations(best: float, worst: float, prefix: str = "") -> str:
    """Hours in a unit that gives them digits."""
    units = {"hours": 1, "minutes": 60, "seconds": 3600}
    unit = next((name for name, factor in units.items() if worst * factor >= 1), "seconds")
    return f"{_range(lambda hours: f'{hours * units[unit]:,.3g}', best, worst)} {prefix}{unit}"


def _conclusion(estimate: Estimate) -> list[str]:
    low, high = estimate.mfu
    best, worst = estimate.hours
    num_gpus = estimate.cluster.num_gpus
    lines = [
        f"MFU {low:.0%} ({high:.0%} at best); assumed: matrix products at {PRODUCT_RATES[0]:.0%} to "
        f"{PRODUCT_RATES[1]:.0%} of the peak, memory at {MEMORY_RATE:.0%}, links at {LINK_RATE:.0%}, FSDP2 "
        f"hidden or not, {_COMPILED[estimate.compiled]} compiled",
        f"training: {_durations(best, worst)}, {_durations(best * num_gpus, worst * num_gpus, 'GPU-')}; "
        "evaluation, saving and scoring of the reference before training come on top",
        f"checkpoint: {filesize.decimal(max(stage.checkpoint for stage in estimate.stages))} per writing process; at "
        f"start a node reads {filesize.decimal(estimate.loaded_bytes_per_node)}",
    ]
    if estimate.budget_reason is None and (budget := estimate.largest_budget) is not None:
        lines.append(f"largest max_tokens_per_micro_batch that fits: about {budget:,}")
    usable = f"{filesize.decimal(int(estimate.usable_memory))}, {RESERVED:.0%} less than the GPU has"
    if estimate.fits:
        return [*lines, f"fits: at most {filesize.decimal(estimate.peak)} of {usable}"]
    lines.append(f"does not fit: {filesize.decimal(estimate.peak)} of {usable}; what to change:")
    return lines + [
        f"  {change.text}: {filesize.decimal(change.peak)}, {'fits' if change.fits else 'does not fit'}"
        for change in changes_that_help(estimate)[:_MOST_CHANGES]
    ]


def _layout_lines(estimate: Estimate, layouts: Sequence[Proposal]) -> list[str]:
    """Each layout of axes in two lines: what it costs, and the settings to change."""
    if not layouts:
        return []
    lines = ["\ncheaper layouts of axes:" if estimate.fits else "layouts of axes that fit:"]
    for layout in layouts:
        found = layout.estimate
        saved = f", {1 - found.mean_seconds / estimate.mean_seconds:.0%} fewer GPU-hours" if estimate.fits else ""
        lines += [
            f"  {_axes(found)}: {_range(_seconds, *found.step_seconds)} seconds per step, "
            f"{filesize.decimal(found.peak)}{saved}",
            f"    {' '.join(layout.overrides)}",
        ]
    return lines


def print_json(report: PlanReport) -> None:
    values = as_json(report.estimate, report.layouts)
    if report.simulated:
        values["simulated"] = simulation_json(report.simulated)
    if report.measured is not None:
        values["calibration"] = asdict(report.measured)
    result_console().print_json(json.dumps(values))


def as_json(estimate: Estimate, layouts: Sequence[Proposal]) -> dict[str, Any]:
    workload, plan = estimate.workload, estimate.workload.plan
    return {
        "fits": estimate.fits,
        "note": estimate.note,
        "gpu": vars(estimate.cluster.gpu),
        "num_gpus": estimate.cluster.num_gpus,
        "axes": vars(estimate.dims),
        "parameters": {"total": estimate.shape.num_parameters, "trained": estimate.shape.num_trained},
        "pairs": {"source": estimate.pairs.source, "is_assumed": workload.is_assumed, "per_epoch": plan.num_pairs},
        "pairs_per_step": plan.pairs_per_step,
        "useful_tokens_per_step": workload.useful_per_step,
        "rows_per_step": workload.rows_per_step,
        "saved_rows": workload.saved_rows,
        "layout": workload.layout,
        "num_steps": plan.num_steps,
        "reference": estimate.parts.mode,
        "stages": [
            {
                "stage": stage.name,
                "memory": stage.memory.by_category | {"total": stage.memory.total},
                "wire_bytes_per_step": stage.wire_bytes,
                "flops_per_step": vars(stage.flops),
                "seconds": vars(stage.roofline),
                "checkpoint_bytes": stage.checkpoint,
            }
            for stage in estimate.stages
        ],
        "usable_memory": estimate.usable_memory,
        "token_budget": estimate.config.actor_train.training_args.max_tokens_per_micro_batch,
        "largest_token_budget": estimate.largest_budget,
        "mfu": estimate.mfu,
        "step_seconds": estimate.step_seconds,
        "hours": estimate.hours,
        "gpu_hours": [hours * estimate.cluster.num_gpus for hours in estimate.hours],
        "loaded_bytes_per_node": estimate.loaded_bytes_per_node,
        "layouts": [
            {
                "axes": vars(layout.estimate.dims),
                "changes": layout.changes,
                "peak": layout.estimate.peak,
                "step_seconds": layout.estimate.step_seconds,
                "gpu_hours": [hours * layout.estimate.cluster.num_gpus for hours in layout.estimate.hours],
            }
            for layout in layouts
        ],
        "changes": [] if estimate.fits else [change._asdict() for change in changes_that_help(estimate)],
    }
