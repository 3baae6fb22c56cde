"""The measured steps of `thresher plan --calibrate`, and the time of a run that they predict."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

if TYPE_CHECKING:
    from rich.console import Console

    from thresher.plan.calibrate import Calibration
    from thresher.plan.estimate import Estimate


def print_calibration(estimate: Estimate, calibration: Calibration, console: Console) -> None:
    num_workers = estimate.config.actor_train.num_processes
    console.print(f"\nreal steps on {num_workers} worker{'' if num_workers == 1 else 's'} of this config")
    table = Table()
    for title in ("pairs", "micro-batches", "GFLOP", "seconds", "by the fit"):
        table.add_column(title, justify="right")
    for step in calibration.steps:
        work = step.work
        table.add_row(
            f"{step.pairs:,}",
            f"{work.micro_batches:g}",
            f"{work.flops / 1e9:,.3g}",
            f"{step.seconds:.3g}",
            f"{calibration.fit.predict(work):.3g}",
        )
    console.print(table)
    fit, steps = calibration.fit, estimate.workload.plan.num_steps
    console.print(
        f"fit: {fit.per_step:.3g} s per step, {fit.per_micro_batch:.3g} s per micro-batch, "
        f"{1e12 * fit.per_flop:.3g} s per TFLOP",
        soft_wrap=True,
    )
    console.print(
        f"predicted on these workers: {calibration.step_seconds:.3g} s per step, "
        f"{steps * calibration.step_seconds / 3600:,.2f} hours for {steps:,} steps",
        soft_wrap=True,
    )
