"""Builders around the training loop: its settings, the supervisor, the trackers and the summary of the run."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from thresher.builders.checkpoints import build_checkpoint_manager
from thresher.builders.inputs import RunInputs
from thresher.checkpoint.manager import DamagedCheckpoints, list_checkpoints
from thresher.checkpoint.manifest import read_manifest
from thresher.checkpoint.save import step_of
from thresher.config import DPOConfig, ModelArgs
from thresher.data.batching.plan import Plan
from thresher.errors import RescaleRequested, RunStopped, UserError
from thresher.observability.health.history import pairs_before_comparison
from thresher.observability.log_files import METRICS, RECOVERIES
from thresher.observability.phase_clock import PhaseClock
from thresher.observability.trackers.callbacks import CallbackTracker
from thresher.observability.trackers.jsonl import find_holes
from thresher.observability.trackers.tracker import RunInfo, Trackers, translate_os_errors
from thresher.redact import redact
from thresher.strategies.strategy import ParameterCounts
from thresher.training import preemption
from thresher.training.loop import LoopSettings
from thresher.training.skipped_steps import SkippedStepLog
from thresher.training.supervisor import Supervisor

if TYPE_CHECKING:
    from thresher.observability.trackers.console import ConsoleTracker

logger = logging.getLogger(__name__)


def stop_file(config: DPOConfig) -> Path:
    """The file that requests a stop; absolute, since workers may have another working directory."""
    return Path(config.output_dir).resolve() / preemption.FILE_NAME


def logging_dir(config: DPOConfig) -> Path:
    """Directory of the metrics and logs of a run."""
    return Path(config.logging_dir or Path(config.output_dir) / "logs")


def describe_unfinished_stop(config: DPOConfig) -> str:
    """What a run that exits after graceful_stop_timeout leaves behind, and what to do."""
    saved = list_checkpoints(build_checkpoint_manager(config).root)
    since = f"since step {step_of(saved[-1])}" if saved else "at all"
    return (
        f"not finished after {config.graceful_stop_timeout:g} s; nothing saved {since}; raise graceful_stop_timeout, "
        "or set save_steps to save more often"
    )


def loop_settings(config: DPOConfig, plan: Plan) -> LoopSettings:
    """When to evaluate and save. All epochs have the same number of steps, so an epoch is an interval like others."""
    per_epoch = {"epoch": plan.steps_per_epoch, "no": 0}
    return LoopSettings(
        eval_steps=per_epoch.get(config.eval_strategy, config.eval_steps),
        save_steps=per_epoch.get(config.save_strategy, config.save_steps),
        eval_on_start=config.eval_on_start,
    )


def build_supervisor(config: DPOConfig, damaged: DamagedCheckpoints, clock: PhaseClock) -> Supervisor:
    checkpoints = build_checkpoint_manager(config)
    return Supervisor(
        config.max_restarts if config.uses_ray else 0,
        latest_checkpoint=lambda: checkpoints.find_to_resume("auto", damaged),
        recovery_log=logging_dir(config) / RECOVERIES,
        damaged=damaged,
        clock=clock,
    )


def build_tracking(
    config: DPOConfig, console: ConsoleTracker | None, callbacks: CallbackTracker | None = None
) -> Trackers:
    # only the process that leads a run has trackers
    from thresher.observability.trackers.factory import TrackerSettings, make_trackers

    settings = TrackerSettings(**config.tracker_kwargs.model_dump())
    return make_trackers(config.track_with, settings, console=console, callbacks=callbacks)


def build_callbacks(config: DPOConfig, callbacks: Sequence[object]) -> CallbackTracker | None:
    """Make a tracker of callbacks of transformers' Trainer, one for all attempts of a run; None without callbacks."""
    if not callbacks:
        return None
    from thresher.config.flat import trl_arguments  # large tables of other trainers' names

    root = build_checkpoint_manager(config).root
    return CallbackTracker(
        callbacks,
        trl_arguments(config),
        stop_file(config),
        lambda: {step: path for path in list_checkpoints(root) if (step := step_of(path)) is not None},
    )


@contextlib.contextmanager
def track(
    trackers: Trackers, config: DPOConfig, plan: Plan, *, resume_step: int | None, max_tokens: int | None = None
) -> Iterator[SkippedStepLog]:
    """Open the trackers for the duration of a run and close them with its outcome; yield the log of skipped steps.

    max_tokens: token budget that was chosen for the run, which trackers show as that of the config.
    """
    values = config.model_dump(mode="json")
    if max_tokens is not None:
        values["actor_train"]["training_args"]["max_tokens_per_micro_batch"] = max_tokens
    run = RunInfo(
        exp_name=config.exp_name,
        run_dir=logging_dir(config),
        config=redact(values),
        total_steps=plan.num_steps,
        total_pairs=plan.num_visits,
        health_from=None
        if config.health == "off"
        else pairs_before_comparison(plan.pairs_per_step * config.logging_steps),
    )
    # a checkpoint of another directory has its log there
    if resume_step is not None and resume_step > 0 and list_checkpoints(build_checkpoint_manager(config).root):
        with translate_os_errors():
            holes = find_holes(run.run_dir / METRICS, resume_step, config.logging_steps)
        if holes is not None:
            logger.warning("%s", holes)
    trackers.start(run, resume_step)
    try:
        yield SkippedStepLog(run.run_dir, resume_step)
    except BaseException as error:
        # SystemExit: a second signal while the run stops
        is_requested = isinstance(error, (KeyboardInterrupt, SystemExit, RunStopped, RescaleRequested))
        with contextlib.suppress(UserError):  # an error while closing must not hide the one that ended the run
            trackers.close("interrupted" if is_requested else "failed")
        raise
    trackers.close("finished")


def run_facts(
    config: DPOConfig, inputs: RunInputs, mode: str, layout: str, devices: str, parameters: ParameterCounts
) -> dict[str, str]:
    """The facts that describe a run to people, by name."""
    plan, validation = inputs.plan, inputs.validation
    epochs = f"{plan.num_epochs:.3g}"
    held_out = "held out " if config.validation and config.validation.split else ""
    return {
        "model": f"{config.policy_path} in {config.actor_train.model_args.dtype}",
        "parameters": _describe_parameters(parameters, config.actor_train.model_args),
        "data": f"{plan.num_pairs:,} pairs" + (f", {len(validation):,} {held_out}for validation" if validation else ""),
        "loss": inputs.objective.describe(),
        "steps": (
            f"{plan.num_steps:,} steps of {plan.pairs_per_step} pairs ({epochs} epoch{'' if epochs == '1' else 's'})"
        ),
        "reference": mode if config.reference_path == config.policy_path else f"{mode}, {config.reference_path}",
        "layout": layout,
        "device": devices,
    }


def summarize_run(facts: Mapping[str, str], plan: Plan, checkpoint: Path | None) -> list[str]:
    """Summarize a run that is about to start, one fact per line."""
    lines = [f"{name:<12}{fact}" for name, fact in facts.items()]
    if checkpoint is not None and read_manifest(checkpoint).step >= plan.num_steps:
        lines.append(f"{checkpoint} has completed all steps; set another output_dir to train again")
    elif checkpoint is not None:
        lines.append(f"resuming from {checkpoint}")
    return lines


def _describe_parameters(counts: ParameterCounts, args: ModelArgs) -> str:
    if counts.trained == counts.total:
        return f"{counts.total:,}, all trained"
    lora = "" if args.lora_rank is None else f": LoRA of rank {args.lora_rank}"
    if args.adapter_name_or_path is not None:
        lora = f": LoRA from {args.adapter_name_or_path}"
    return f"{counts.total:,}, of which {counts.trained:,} ({counts.trained / counts.total:.3%}) are trained{lora}"
