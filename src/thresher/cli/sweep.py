"""`thresher sweep`: runs every combination of listed settings on Ray Tune, and compares the runs."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from thresher.cli.arguments import ConfigFile

if TYPE_CHECKING:
    from rich.table import Table

    from thresher.config import DPOConfig
    from thresher.sweep.grid import Trial
    from thresher.sweep.results import Group, Result
    from thresher.sweep.run import Sweep

logger = logging.getLogger(__name__)

_REPORT = "report.html"
_REDUCTION_FACTOR = 4.0


def sweep(
    path: ConfigFile,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE,...", help="Settings; those with several values span the grid."),
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
        float, typer.Option(help="asha: of each number of trials, one in this many continues.", min=1.01)
    ] = _REDUCTION_FACTOR,
    max_concurrent: Annotated[
        int | None, typer.Option(help="Trials at a time; one on CPUs, as many as fit on GPUs, if absent.", min=1)
    ] = None,
) -> None:
    """Run every combination of the listed values, resume after a kill, and compare the runs."""
    from thresher.sweep.grid import make_trials

    trials = make_trials(overrides or [])

    from thresher.errors import UserError
    from thresher.sweep.run import Sweep, SweepSettings

    if scheduler not in ("fifo", "asha"):
        raise UserError(f"--scheduler is {scheduler!r}; use fifo or asha")
    if scheduler == "fifo" and (grace_steps is not None or reduction_factor != _REDUCTION_FACTOR):
        raise UserError("--grace-steps and --reduction-factor have no effect without --scheduler asha")
    has_validation = _loads_validation(path, trials[0])
    metric = metric or ("eval/rewards/accuracies" if has_validation else "rewards/accuracies")
    if metric.startswith("eval/") and not has_validation:
        raise UserError(f"--metric {metric} needs validation pairs; set validation.data_args or validation.split")
    settings = SweepSettings(
        metric, _mode(mode, metric), scheduler == "asha", grace_steps, reduction_factor, max_concurrent
    )
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


def _loads_validation(path: Path, trial: Trial) -> bool:
    from thresher.sweep.grid import trial_config

    return trial_config(path, trial).validation is not None


def _mode(mode: str | None, metric: str) -> Literal["max", "min"]:
    from thresher.errors import UserError

    if mode not in (None, "max", "min"):
        raise UserError(f"--mode is {mode!r}; use max or min")
    lower_is_better = metric.rpartition("/")[2] in ("loss", "kl", "rejected")
    return "min" if mode == "min" or (mode is None and lower_is_better) else "max"


def _prepare_in_child(path: Path, trials: Sequence[Trial]) -> None:
    """Check the trials, and prepare what they share, in a process that frees the reference when it ends."""
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    from thresher.cli.terminal import shown_level

    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        pool.submit(prepare_trials, path, trials, shown_level()).result()


def prepare_trials(path: Path, trials: Sequence[Trial], level: int) -> None:
    """Check every trial; then prepare the pairs, and score the reference, once for all trials that share them."""
    from thresher.cli.terminal import log_to_terminal, quiet_libraries
    from thresher.sweep.grid import trial_config
    from thresher.sweep.shared_inputs import check_trials, distinct_inputs

    with log_to_terminal(level):
        quiet_libraries()
        configs = {trial.name: trial_config(path, trial) for trial in trials}
        for text in check_trials(configs):
            logger.warning("%s", text)
        for config in distinct_inputs(list(configs.values())):
            _prepare_inputs(config)


def _prepare_inputs(config: DPOConfig) -> None:
    from thresher.builders.hardware import gpu_of
    from thresher.builders.inputs import open_inputs
    from thresher.builders.objective import build_objective
    from thresher.builders.reference import precompute_reference
    from thresher.builders.reference_mode import reference_mode
    from thresher.builders.token_budget import with_token_budget
    from thresher.cli.prepare import build_and_report
    from thresher.cli.terminal import progress_lines

    objective = build_objective(config)
    # with workers, the first trial scores the reference, on the devices that the config gives it
    if reference_mode(config, objective) != "precompute" or config.uses_ray:
        open_inputs(config, objective, build_and_report)
        return
    precompute_reference(
        config,
        all_pairs=False,
        progress=progress_lines(),
        build_store=build_and_report,
        choose_budget=lambda inputs, device: with_token_budget(config, inputs, None, lambda: gpu_of(device)),
    )


def _show(planned: Sweep, results: Sequence[Result]) -> None:
    """Print the results, best first, and write the report that compares the runs."""
    from thresher.cli.terminal import print_line, result_console
    from thresher.errors import UserError
    from thresher.report.write import write_report
    from thresher.sweep.results import group_by_seed

    console = result_console()
    console.print(results_table(results, planned.settings.metric, planned.settings.mode))
    if groups := group_by_seed(results):
        console.print(groups_table(groups, results, planned.settings.metric))
    report = planned.directory / _REPORT
    try:
        logged = [run for run, result in zip(planned.run_dirs, results, strict=True) if result.metrics]
        write_report(logged, report)
    except UserError as error:  # the results are complete without it
        logger.warning("no report: %s", error)
    else:
        print_line(str(report))


def results_table(results: Sequence[Result], metric: str, mode: Literal["max", "min"]) -> Table:
    """One row per trial, best first."""
    from rich.table import Table

    from thresher.sweep.results import ranked, shown_metrics

    names = shown_metrics(results, metric)
    table = Table()
    for heading in (*results[0].trial.values, "state", "step", *names):
        table.add_column(heading, justify="right" if heading in ("step", *names) else "left")
    for result in ranked(results, metric, mode):
        numbers = [_number(result.metrics.get(name)) for name in names]
        table.add_row(*result.trial.values.values(), result.end.state, str(result.step), *numbers)
    return table


def groups_table(groups: Sequence[Group], results: Sequence[Result], metric: str) -> Table:
    """One row per combination of the settings other than the seed: means with 95 % intervals."""
    from rich.table import Table

    from thresher.sweep.results import shown_metrics

    names = shown_metrics(results, metric)
    table = Table(title="mean over seeds, with 95 % interval", title_justify="left")
    for heading in (*groups[0].values, "seeds", *names):
        table.add_column(heading, justify="right" if heading in ("seeds", *names) else "left")
    for group in groups:
        cells = [_interval(group.metrics.get(name)) for name in names]
        table.add_row(*group.values.values(), str(group.num_trials), *cells)
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _interval(value: tuple[float, float] | None) -> str:
    if value is None:
        return "-"
    mean, width = value
    return f"{mean:.4g}" if math.isnan(width) else f"{mean:.4g} ± {width:.2g}"
