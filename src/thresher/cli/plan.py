"""`thresher plan`: memory, communication, time and GPU-hours of a run by formula or simulation, before it starts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from thresher.cli.arguments import ConfigFile, Overrides
from thresher.cli.terminal import quiet_libraries, working

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
        bool, typer.Option("--simulate", help="Also run a short step on fake tensors, and count.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Predict memory, communication, time and GPU-hours of a run by formula; exit code 2 if it does not fit."""
    from thresher.builders.hardware import find_gpu
    from thresher.cli.plan_report import peak_of, print_json, print_plan
    from thresher.config import load_config
    from thresher.plan.estimate import estimate_run
    from thresher.plan.search import cheaper_meshes

    quiet_libraries()
    hardware = find_gpu(gpu).with_rates(peak_flops=peak_flops, memory=memory, bandwidth=bandwidth)
    config = load_config(path, overrides or [])
    with working("reading the model and the pairs"):
        estimate = estimate_run(config, hardware, nodes, gpus_per_node).with_chosen_budget()
        estimate.stages  # noqa: B018  # computed on first use
    simulated = _simulate(estimate) if simulate else []
    with working("searching cheaper meshes"):
        meshes = cheaper_meshes(estimate)
    (print_json if json else print_plan)(estimate, meshes, simulated)
    if peak_of(estimate, simulated) > estimate.usable_memory:
        raise typer.Exit(2)


def _simulate(estimate: Estimate) -> list[SimulatedRank]:
    """Simulate one rank after the other, and say which."""
    from thresher.plan.simulate.run import simulate_stage, typical_micro_batches

    micro_batches, stages = typical_micro_batches(estimate), estimate.processes
    found: list[SimulatedRank] = []
    for name in stages:
        of_stage = "" if name == "all" else f" of the {name} stage"
        with working(f"simulating a rank{of_stage}, {len(found) + 1} of {len(stages)}; a minute for large models"):
            found.append(simulate_stage(estimate, name, micro_batches))
    return found
