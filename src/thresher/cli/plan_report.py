"""The result of `thresher plan` as tables, or as JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich import filesize
from rich.table import Table

from thresher.builders.hardware import COMPUTE_RATES, LINK_RATE
from thresher.builders.memory import RESERVED
from thresher.cli.terminal import make_table, print_lines, result_console
from thresher.plan.search import changes_that_help

if TYPE_CHECKING:
    from thresher.plan.estimate import Estimate
    from thresher.plan.search import Proposal
    from thresher.plan.simulate.run import SimulatedRank

_COMPILED = {"nothing": "nothing", "functions": "norms and activations", "layers": "layers"}
_MOST_CHANGES = 6


def peak_of(estimate: Estimate, simulated: Sequence[SimulatedRank]) -> float:
    """Peak memory of a GPU: counted if ranks were simulated, by formula otherwise."""
    return max((rank.counted.peak for rank in simulated), default=estimate.peak)


def print_plan(estimate: Estimate, meshes: Sequence[Proposal], simulated: Sequence[SimulatedRank]) -> None:
    """Print the verdict and what to change first, then the figures behind them."""
    console = result_console()
    print_lines(*_verdict(estimate, peak_of(estimate, simulated)), *_mesh_lines(estimate, meshes), "")
    print_lines(*_facts(estimate), "\nmemory per GPU at the peak of a step")
    console.print(_memory_table(estimate))
    if any(stage.wire_bytes for stage in estimate.stages):
        print_lines("\nbytes that a GPU sends per step")
        console.print(_traffic_table(estimate))
    print_lines("\nexpected seconds per step")
    console.print(_time_table(estimate))
    if simulated:
        print_lines("\nsimulated on fake tensors: a step of the longest and of median micro-batches")
        console.print(_simulation_table(simulated))
        waits: Counter[str] = Counter()
        for rank in simulated:
            waits |= Counter(rank.counted.reads)
        lines = (f"  {count:>4} x {line}" for line, count in waits.most_common())
        print_lines("the host waits for the device in", *lines)
    print_lines(*_totals(estimate))


def _facts(estimate: Estimate) -> list[str]:
    workload, size, cluster, plan = estimate.workload, estimate.known.size.parameters, estimate.cluster, estimate.plan
    assumed = " (assumed)" if estimate.pairs.is_assumed else ""
    useful, notes = workload.useful_per_step, []
    if not cluster.gpu.has_bf16 and estimate.config.actor_train.model_args.dtype == "bf16":
        notes.append(
            f"precision: {cluster.gpu.name} has no bf16, and the rates are for fp16; set "
            "actor_train.model_args.dtype=fp16"
        )
    if estimate.budget_reason is not None:
        tokens = estimate.config.actor_train.training_args.max_tokens_per_micro_batch
        shown = "no limit" if tokens is None else f"{tokens:,}"
        notes.append(f"max_tokens_per_micro_batch: auto -> {shown}, {estimate.budget_reason}")
    if workload.mismatched is not None:
        notes.append(
            f"kto: {workload.mismatched.total:,} rows of mismatched answers per data-parallel rank and step, scored "
            "without gradient; their lengths are drawn from the answers"
        )
    return [
        f"model: {estimate.parts.policy_path}, {size.total:,.0f} parameters, {size.trained:,.0f} trained",
        f"GPUs: {cluster.num_gpus} x {cluster.gpu.name}, {_mesh(estimate)}",
        f"{estimate.pairs.unit}: {estimate.pairs.source}",
        f"step: {plan.pairs_per_step:,} {estimate.pairs.unit}, {useful:,.0f} useful tokens{assumed}",
        f"micro-batches: {workload.most_micro_batches} per data-parallel rank, the largest of "
        f"{workload.largest.total:,} tokens",
        f"epoch: {plan.num_pairs:,} {estimate.pairs.unit}, {useful * plan.steps_per_epoch:,.0f} useful tokens, "
        f"{plan.steps_per_epoch:,} steps{assumed}; the run has {plan.num_steps:,} steps",
        f"layout: {estimate.parts.layout.name}, {workload.rows_per_step:,.0f} rows per step, "
        f"{workload.saved_rows:.0%} fewer than padded",
        f"reference: {estimate.parts.mode}",
        *notes,
    ]


def _mesh(estimate: Estimate) -> str:
    return ", ".join(f"{name} {size}" for name, size in vars(estimate.dims).items() if size > 1) or "one process"


def _bytes(size: float) -> str:
    return filesize.decimal(round(size))


def _table(first: str, estimate: Estimate, *others: str) -> Table:
    """Make a table with a column per stage."""
    stages = ["every GPU" if stage.name == "all" else f"{stage.name} stage" for stage in estimate.stages]
    return make_table("", [first], [*others, *stages])


def _memory_table(estimate: Estimate) -> Table:
    table, memories = _table("category", estimate), [stage.memory for stage in estimate.stages]
    for name in memories[0].by_category:
        # a peak before the first backward has no gradients
        is_early = name == "gradients" and any(memory.optimizer and not memory.gradients for memory in memories)
        sizes = [memory.by_category[name] for memory in memories]
        table.add_row(name.replace("_", " "), *("not yet" if is_early and not size else _bytes(size) for size in sizes))
    table.add_section()
    table.add_row("total", *(_bytes(memory.total) for memory in memories))
    return table


def _traffic_table(estimate: Estimate) -> Table:
    table, cluster = _table("mesh dimension", estimate, "link"), estimate.cluster
    for mesh_dim in dict.fromkeys(mesh_dim for stage in estimate.stages for mesh_dim in stage.wire_bytes):
        is_inside = cluster.bandwidth(mesh_dim, estimate.dims) >= LINK_RATE * cluster.gpu.intra_node
        sent = [_bytes(stage.wire_bytes.get(mesh_dim, 0)) for stage in estimate.stages]
        table.add_row(mesh_dim, "node" if is_inside else "network", *sent)
    return table


def _time_table(estimate: Estimate) -> Table:
    table, times = _table("work", estimate), [stage.time for stage in estimate.stages]
    table.add_row("computing", *(_seconds(time.compute) for time in times))
    table.add_row("optimizer", *(_seconds(time.optimizer) for time in times))
    for mesh_dim in dict.fromkeys(mesh_dim for time in times for mesh_dim in time.communication):
        table.add_row(f"sending, {mesh_dim}", *(_seconds(time.communication.get(mesh_dim, 0.0)) for time in times))
    if any(time.communication for time in times):
        table.add_row("sending that is not hidden", *(_seconds(time.exposed) for time in times))
    if estimate.dims.pp > 1:
        table.add_row("pipeline bubble", *(_seconds(time.bubble) for time in times))
    table.add_section()
    table.add_row("step", *(_seconds(time.total) for time in times))
    return table


def _seconds(value: float) -> str:
    """Three digits, and nothing below a microsecond."""
    return f"{round(value, 6):.3g}"


def _duration(hours: float, prefix: str = "") -> str:
    """Hours in a unit that gives them digits."""
    units = {"hours": 1, "minutes": 60, "seconds": 3600}
    unit = next((name for name, factor in units.items() if hours * factor >= 1), "seconds")
    return f"{hours * units[unit]:,.3g} {prefix}{unit}"


def _simulation_table(ranks: Sequence[SimulatedRank]) -> Table:
    """Counted and computed figures of one step, side by side."""
    titles = [title for rank in ranks for title in (f"rank {rank.counted.rank}, counted", "by formula")]
    table = make_table("", ["of the simulated step"], titles)
    count = "{:,.0f}".format

    def add(name: str, show: Callable[[float], str], figures: Iterable[tuple[float, float | None]]) -> None:
        table.add_row(name, *("" if value is None else show(value) for pair in figures for value in pair))

    add("peak memory", _bytes, ((r.counted.peak, r.memory.total) for r in ranks))
    add("held between steps", _bytes, ((r.counted.held, r.memory.weights + r.memory.optimizer) for r in ranks))
    for mesh_dim in dict.fromkeys(mesh_dim for rank in ranks for mesh_dim in rank.wire_bytes):
        sent = ((r.counted.wire_bytes.get(mesh_dim, 0), r.wire_bytes.get(mesh_dim, 0)) for r in ranks)
        add(f"sent, {mesh_dim}", _bytes, sent)
    table.add_section()
    for place, on_host in (("device", False), ("host", True)):
        calls = (sum(each.calls for each in r.counted.collectives if each.on_host == on_host) for r in ranks)
        add(f"collectives on the {place}", count, ((number, None) for number in calls))
    add("operations on the device", count, ((r.counted.operations, None) for r in ranks))
    flops = ((sum(r.counted.flops.values()) / 1e12, r.flops / 1e12) for r in ranks)
    add("TFLOP in matrix products", "{:,.2f}".format, flops)
    add("waits of the host for the device", count, ((sum(r.counted.reads.values()), None) for r in ranks))
    return table


def _verdict(estimate: Estimate, peak: float) -> list[str]:
    """Whether the run fits; if not, what to change."""
    usable = f"{_bytes(estimate.usable_memory)} ({RESERVED:.0%} of the GPU is kept free)"
    if peak <= estimate.usable_memory:
        return [f"fits: at most {_bytes(peak)} of {usable}"]
    return [
        f"does not fit: {_bytes(peak)} of {usable}; what to change:",
        *(
            f"  {change.text}: {_bytes(change.peak)}, {'fits' if change.fits else 'does not fit'}"
            for change in changes_that_help(estimate)[:_MOST_CHANGES]
        ),
    ]


def _totals(estimate: Estimate) -> list[str]:
    hours, rate = estimate.hours, COMPUTE_RATES[estimate.compiled]
    lines = [
        f"MFU {estimate.mfu:.0%}; assumed: computing at {100 * rate:g}% of the peak, links at {LINK_RATE:.0%}, "
        f"{_COMPILED[estimate.compiled]} compiled",
        f"training: {_duration(hours)}, {_duration(hours * estimate.cluster.num_gpus, 'GPU-')}",
        "not included: evaluation, saving, and scoring the reference before training",
        f"checkpoint: {_bytes(estimate.checkpoint_bytes)} per writing process; at start a node reads "
        f"{_bytes(estimate.loaded_bytes_per_node)}",
    ]
    if estimate.budget_reason is None and (budget := estimate.largest_budget) is not None:
        lines.append(f"largest max_tokens_per_micro_batch that fits for certain: about {budget:,}")
    return lines


def _mesh_lines(estimate: Estimate, meshes: Sequence[Proposal]) -> list[str]:
    """Each mesh in two lines: what it costs, and the settings to change."""
    if not meshes:
        return []
    lines = ["\ncheaper meshes:" if estimate.fits else "meshes that fit:"]
    for mesh in meshes:
        found = mesh.estimate
        saved = f", {1 - found.step_seconds / estimate.step_seconds:.0%} fewer GPU-hours" if estimate.fits else ""
        lines += [
            f"  {_mesh(found)}: {_seconds(found.step_seconds)} seconds per step, {_bytes(found.peak)}{saved}",
            f"    {' '.join(mesh.overrides)}",
        ]
    return lines


def print_json(estimate: Estimate, meshes: Sequence[Proposal], simulated: Sequence[SimulatedRank]) -> None:
    workload, plan, cluster = estimate.workload, estimate.plan, estimate.cluster
    size = estimate.known.size.parameters
    pairs = {"source": estimate.pairs.source, "is_assumed": estimate.pairs.is_assumed}
    values: dict[str, Any] = {
        "fits": peak_of(estimate, simulated) <= estimate.usable_memory,
        "gpu": vars(cluster.gpu),
        "num_gpus": cluster.num_gpus,
        "mesh": vars(estimate.dims),
        "parameters": {"total": round(size.total), "trained": round(size.trained)},
        "pairs": {**pairs, "per_epoch": plan.num_pairs},
        "pairs_per_step": plan.pairs_per_step,
        "useful_tokens_per_step": workload.useful_per_step,
        "rows_per_step": workload.rows_per_step,
        "saved_rows": workload.saved_rows,
        "layout": estimate.parts.layout.name,
        "num_steps": plan.num_steps,
        "reference": estimate.parts.mode,
        "stages": [
            {
                "stage": stage.name,
                "memory": stage.memory.by_category | {"total": stage.memory.total},
                "wire_bytes_per_step": stage.wire_bytes,
                "flops_per_step": vars(stage.flops),
                "seconds": vars(stage.time) | {"total": stage.time.total},
            }
            for stage in estimate.stages
        ],
        "usable_memory": estimate.usable_memory,
        "token_budget": estimate.config.actor_train.training_args.max_tokens_per_micro_batch,
        "largest_token_budget": estimate.largest_budget,
        "mfu": estimate.mfu,
        "checkpoint_bytes": estimate.checkpoint_bytes,
        "loaded_bytes_per_node": estimate.loaded_bytes_per_node,
        **_costs(estimate),
        "meshes": [
            {"mesh": vars(each.estimate.dims), "changes": each.changes, **_costs(each.estimate)} for each in meshes
        ],
        "changes": [] if estimate.fits else [change._asdict() for change in changes_that_help(estimate)],
    }
    if simulated:
        values["simulated"] = [
            {
                "stage": rank.stage,
                **asdict(rank.counted),
                "wire_bytes": rank.counted.wire_bytes,
                "by_formula": {"peak": rank.memory.total, "wire_bytes": rank.wire_bytes, "flops": rank.flops},
            }
            for rank in simulated
        ]
    result_console().print_json(json.dumps(values))


def _costs(estimate: Estimate) -> dict[str, float]:
    return {
        "peak": estimate.peak,
        "step_seconds": estimate.step_seconds,
        "hours": estimate.hours,
        "gpu_hours": estimate.hours * estimate.cluster.num_gpus,
    }
