"""`thresher sweep`: runs every combination of listed settings on Ray Tune, and compares the runs."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from thresher.cli.arguments import ConfigFile
from thresher.cli.terminal import log_to_terminal, log_warnings, make_table, print_lines, result_console, shown_level
from thresher.errors import UserError

if TYPE_CHECKING:
    from thresher.sweep.grid import Trial
    from thresher.sweep.results import Mode, Result
    from thresher.sweep.run import Sweep

logger = logging.getLogger(__name__)

_REPORT = "report.html"
_REDUCTION_FACTOR = 4.0


def sweep(
    path: ConfigFile,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE,...", help="Settings; the ones with several values span the grid."),
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(help="Metric to compare by; eval/rewards/accuracies, or rewards/accuracies without validation."),
    ] = None,
    mode: Annotated[str | None, typer.Option(help="max or min; min for losses and KL.", show_default=False)] = None,
    scheduler: Annotated[str, typer.Option(help="fifo runs every trial to its end, asha stops bad ones.")] = "fifo",
    grace_steps: Annotated[
        int | None, typer.Option(help="asha: steps before the first decision; eval_steps if absent.", min=1)
    ] = None,
    reduction_factor: Annotated[
        float, typer.Option(help="asha: keep the best 1/N of the trials at each rung.", min=1.01)
    ] = _REDUCTION_FACTOR,
    max_concurrent: Annotated[
        int | None, typer.Option(help="Trials at a time; one on CPUs, as many as fit on GPUs, if absent.", min=1)
    ] = None,
) -> None:
    """Run every combination of the listed values, resume after a kill, and compare the runs."""
    from thresher.sweep.grid import make_trials, trial_config

    trials = make_trials(overrides or [])
    if scheduler not in ("fifo", "asha"):
        raise UserError(f"--scheduler is {scheduler!r}; use fifo or asha")
    if scheduler == "fifo" and (grace_steps is not None or reduction_factor != _REDUCTION_FACTOR):
        raise UserError("--grace-steps and --reduction-factor have no effect without --scheduler asha")
    has_validation = trial_config(path, trials[0]).validation is not None
    metric = metric or ("eval/rewards/accuracies" if has_validation else "rewards/accuracies")
    if metric.startswith("eval/") and not has_validation:
        raise UserError(f"--metric {metric} needs validation pairs; set validation.data_args or validation.split")
    if mode not in (None, "max", "min"):
        raise UserError(f"--mode is {mode!r}; use max or min")
    lower_is_better = metric.endswith(("loss", "kl", "rejected")) if mode is None else mode == "min"

    from thresher.sweep.run import Sweep, SweepSettings  # imports torch

    best: Mode = "min" if lower_is_better else "max"
    settings = SweepSettings(metric, best, scheduler == "asha", grace_steps, reduction_factor, max_concurrent)
    planned = Sweep(path, trials, settings)
    logger.info("%d trials in %s", len(trials), planned.directory)
    results = planned.run(lambda: _prepare_in_child(path, trials))
    _show(planned, results)
    if failed := [result for result in results if result.end.state == "failed"]:
        first = failed[0]
        raise UserError(
            f"{len(failed)} of {len(results)} trials failed, the first is {first.trial.name}: {first.end.message}\n"
            "rerun the same command to try them again"
        )


def _prepare_in_child(path: Path, trials: Sequence[Trial]) -> None:
    """Check the trials, and prepare what they share, in a process that frees the reference when it ends."""
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        pool.submit(prepare_trials, path, trials, shown_level()).result()


def prepare_trials(path: Path, trials: Sequence[Trial], level: int) -> None:
    """Check every trial; then prepare the pairs, and score the reference, once for all trials that share them."""
    from thresher.builders.inputs import RunInputs
    from thresher.builders.objective import build_objective
    from thresher.builders.preflight import check_run
    from thresher.builders.reference_mode import reference_mode
    from thresher.cli.precompute_reference import fill_cache
    from thresher.cli.prepare import build_and_report
    from thresher.sweep.grid import distinct_inputs, trial_config

    with log_to_terminal(level):
        configs = [trial_config(path, trial) for trial in trials]
        warnings: dict[str, None] = {}  # each once
        for trial, config in zip(trials, configs, strict=True):
            try:
                _, found = check_run(config)
                warnings |= dict.fromkeys(found)
            except UserError as error:
                raise UserError(f"trial {trial.name}: {error}") from None
        log_warnings(warnings)
        for config in distinct_inputs(configs):
            objective = build_objective(config)
            # with workers, the first trial scores the reference, on the devices that the config gives it
            if reference_mode(config, objective) == "precompute" and not config.uses_ray:
                fill_cache(config, all_pairs=False)
            else:
                RunInputs(config, build_and_report).open()


def _show(planned: Sweep, results: Sequence[Result]) -> None:
    """Print the results, best first, and write the report that compares the runs."""
    from thresher.report.page import write_report
    from thresher.sweep.results import group_by_seed, ranked, shown_metrics

    metric, mode = planned.settings.metric, planned.settings.mode
    metrics, console = shown_metrics(results, metric), result_console()
    rows = [
        (*each.trial.values.values(), each.end.state, str(each.step), *(_shown(each.metrics.get(m)) for m in metrics))
        for each in ranked(results, metric, mode)
    ]
    console.print(make_table("", [*results[0].trial.values, "state"], ["step", *metrics], rows))
    if groups := group_by_seed(results):
        rows = [
            (*group.values.values(), str(group.num_trials), *(_shown(group.metrics.get(m)) for m in metrics))
            for group in groups
        ]
        title = "mean over seeds, with 95 % interval"
        console.print(make_table(title, list(groups[0].values), ["seeds", *metrics], rows))
    report = planned.directory / _REPORT
    try:
        logged = [run for run, result in zip(planned.run_dirs, results, strict=True) if result.metrics]
        write_report(logged, report)
    except UserError as error:  # the results are complete without it
        logger.warning("no report: %s", error)
    else:
        print_lines(str(report))


def _shown(value: float | tuple[float, float] | None) -> str:
    """Show a number, or a mean with the width of its interval."""
    if value is None:
        return "-"
    mean, width = value if isinstance(value, tuple) else (value, math.nan)
    return f"{mean:.4g}" if math.isnan(width) else f"{mean:.4g} ± {width:.2g}"
