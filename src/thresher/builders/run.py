"""Builders around the training loop: its settings, the supervisor, the trackers and the summary of the run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from thresher.builders.checkpoints import build_checkpoint_manager
from thresher.checkpoint.manifest import read_manifest
from thresher.config import DPOConfig
from thresher.data.batching.plan import Plan
from thresher.errors import RescaleRequested, RunStopped, UserError
from thresher.losses.objective import Objective
from thresher.losses.registry import parameter_defaults
from thresher.observability.trackers.console import ConsoleTracker
from thresher.observability.trackers.factory import TrackerSettings, make_trackers
from thresher.observability.trackers.tracker import RunInfo, Trackers
from thresher.redact import redact
from thresher.training import preemption
from thresher.training.loop import LoopSettings
from thresher.training.skipped_steps import SkippedStepLog
from thresher.training.supervisor import Supervisor


def stop_file(config: DPOConfig) -> Path:
    """The file that requests a stop; absolute, since workers may have another working directory."""
    return Path(config.output_dir).resolve() / preemption.FILE_NAME


def logging_dir(config: DPOConfig) -> Path:
    """Directory of the metrics and logs of a run."""
    return Path(config.logging_dir or Path(config.output_dir) / "logs")


def loop_settings(config: DPOConfig) -> LoopSettings:
    return LoopSettings(eval_steps=config.eval_steps, save_steps=config.save_steps, eval_on_start=config.eval_on_start)


def build_supervisor(config: DPOConfig) -> Supervisor:
    checkpoints = build_checkpoint_manager(config)
    return Supervisor(
        config.max_restarts if config.uses_ray else 0,
        latest_checkpoint=lambda: checkpoints.find_to_resume("auto"),
        recovery_log=logging_dir(config) / "recoveries.jsonl",
    )


def build_tracking(config: DPOConfig, console: ConsoleTracker | None) -> Trackers:
    settings = TrackerSettings(**config.tracker_kwargs.model_dump())
    return make_trackers(config.track_with, settings, console=console)


@contextlib.contextmanager
def track(trackers: Trackers, config: DPOConfig, plan: Plan, *, resume_step: int | None) -> Iterator[SkippedStepLog]:
    """Open the trackers for the duration of a run and close them with its outcome; yield the log of skipped steps."""
    run = RunInfo(
        exp_name=config.exp_name,
        run_dir=logging_dir(config),
        config=redact(config.model_dump(mode="json")),
        total_steps=plan.num_steps,
        total_pairs=plan.num_visits,
    )
    trackers.start(run, resume_step)
    try:
        yield SkippedStepLog(run.run_dir, resume_step)
    except BaseException as error:
        is_requested = isinstance(error, (KeyboardInterrupt, RunStopped, RescaleRequested))
        with contextlib.suppress(UserError):  # an error while closing must not hide the one that ended the run
            trackers.close("interrupted" if is_requested else "failed")
        raise
    trackers.close("finished")


def describe_run(
    objective: Objective, plan: Plan, mode: str, layout: str, devices: str, checkpoint: Path | None
) -> str:
    """Summarize the run in one line."""
    epochs = f"{plan.num_epochs:.3g}"
    line = (
        f"loss: {describe_losses(objective)}; {plan.num_steps:,} steps of {plan.pairs_per_step} pairs "
        f"({epochs} epoch{'' if epochs == '1' else 's'} of {plan.num_pairs:,} pairs); reference: {mode}; "
        f"layout: {layout}; device: {devices}"
    )
    if checkpoint is None:
        return line
    if read_manifest(checkpoint).step >= plan.num_steps:
        return f"{line}; {checkpoint} has completed all steps; set another output_dir to train again"
    return f"{line}; resuming from {checkpoint}"


def describe_losses(objective: Objective) -> str:
    """Name the losses with their parameters, and with their weights unless the only one is 1."""
    names = []
    for loss, weight in objective.terms:
        values = ", ".join(f"{name}={getattr(loss, name):g}" for name in parameter_defaults(loss.name))
        names.append(f"{weight:g} x {loss.name}" + (f"({values})" if values else ""))
    return names[0].removeprefix("1 x ") if len(names) == 1 else " + ".join(names)
