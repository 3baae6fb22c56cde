"""`thresher plan`: memory, communication, time and cost of a run by formula or simulation, before it starts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from thresher.cli.arguments import ConfigFile, Overrides

if TYPE_CHECKING:
    from thresher.plan.estimate import Estimate
    from thresher.plan.simulate.run import SimulatedRank


def plan(
    path: ConfigFile,
    overrides: Overrides = None,
    gpu: Annotated[str, typer.Option("--gpu", metavar="NAME", help="GPU: h100, a100, l4, 4090, mi300x, ...")] = "h100",
    peak_flops: Annotated[float | None, typer.Option("--peak-flops", help="Peak dense bf16 TFLOP/s of a GPU.")] = None,
    memory: Annotated[float | None, typer.Option("--memory", help="Memory of a GPU in GB.")] = None,
    bandwidth: Annotated[
        float | None, typer.Option("--bandwidth", help="GB/s per GPU between nodes, in each direction.")
    ] = None,
    nodes: Annotated[int | None, typer.Option("--nodes", min=1, help="Number of nodes.")] = None,
    gpus_per_node: Annotated[int | None, typer.Option("--gpus-per-node", min=1, help="GPUs of each node.")] = None,
    simulate: Annotated[
        bool, typer.Option("--simulate", help="Also run the code of a step on tensors without values, and count.")
    ] = False,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Make a few real steps on the config's workers to predict their time.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Also write the report as .html or .svg.")
    ] = None,
) -> None:
    """Predict memory, communication, time and cost of a run by formula; exit code 2 if it does not fit."""
    from thresher.cli.plan_report import PlanReport, print_json, print_plan, save_plan
    from thresher.cli.terminal import quiet_libraries, working
    from thresher.cli.timed_steps import time_steps
    from thresher.config import load_config
    from thresher.errors import UserError
    from thresher.plan.axes import cheaper_layouts
    from thresher.plan.budget import with_chosen_budget
    from thresher.plan.calibrate import calibrate as run_calibration
    from thresher.plan.hardware import find_gpu
    from thresher.plan.search import estimate_run

    if output is not None and output.suffix not in (".html", ".svg"):
        raise UserError(f"--output {output} is neither .html nor .svg; use one of these endings")
    quiet_libraries()
    hardware = find_gpu(gpu).with_rates(peak_flops=peak_flops, memory=memory, bandwidth=bandwidth)
    config = load_config(path, overrides or [])
    with working("reading the model and the pairs"):
        estimate = with_chosen_budget(estimate_run(config, hardware, nodes, gpus_per_node))
        estimate.stages  # noqa: B018  # computed on first use
    simulated = _simulate(estimate) if simulate else []
    measured = run_calibration(estimate, time_steps) if calibrate else None
    with working("searching cheaper layouts of axes"):
        layouts = cheaper_layouts(estimate)
    report = PlanReport(estimate, layouts, simulated, measured)
    (print_json if json else print_plan)(report)
    if output is not None:
        save_plan(report, output)
    if not estimate.fits or any(rank.counted.peak > estimate.usable_memory for rank in simulated):
        raise typer.Exit(2)


def _simulate(estimate: Estimate) -> list[SimulatedRank]:
    """Simulate one rank after the other, and say which."""
    from thresher.cli.terminal import working
    from thresher.plan.simulate.run import simulate_stage, typical_micro_batches

    micro_batches, stages = typical_micro_batches(estimate), estimate.stage_indices
    found: list[SimulatedRank] = []
    for name, index in stages.items():
        of_stage = "" if name == "all" else f" of the {name} stage"
        with working(f"simulating a rank{of_stage}, {len(found) + 1} of {len(stages)}; a minute for large models"):
            found.append(simulate_stage(estimate, name, index, micro_batches))
    return found
