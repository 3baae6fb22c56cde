"""Builders around the training loop: its settings, the supervisor, the trackers, run.json, and the run's health."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from thresher import durable
from thresher.builders.checkpoints import build_checkpoint_manager, config_changes
from thresher.builders.data import describe_mixture
from thresher.builders.inputs import RunInputs
from thresher.builders.objective import refused_settings
from thresher.builders.reference_mode import same_initial_weights
from thresher.checkpoint.manager import DamagedCheckpoints, list_checkpoints
from thresher.checkpoint.manifest import read_manifest
from thresher.checkpoint.save import step_of
from thresher.config import DPOConfig, ModelArgs
from thresher.data.batching.plan import Plan
from thresher.data.prepare.report import report_of
from thresher.data.store.joined import Stores
from thresher.data.store.reader import ExampleStore
from thresher.errors import HealthStopped, RescaleRequested, RunStopped, UserError
from thresher.foreign_names import foreign
from thresher.models.loading.load import DTYPES
from thresher.observability.health.history import History, pairs_before_comparison
from thresher.observability.health.monitor import HealthMonitor, rules_that_stopped
from thresher.observability.log_files import DESCRIPTION, HEALTH, METRICS, RECOVERIES, SKIPPED_STEPS
from thresher.observability.machine import environment
from thresher.observability.timing import PhaseClock
from thresher.observability.trackers.callbacks import CallbackTracker
from thresher.observability.trackers.jsonl import StepLog, find_holes
from thresher.observability.trackers.tracker import START_OVER, RunInfo, Trackers, translate_os_errors
from thresher.redact import redact
from thresher.reference.step_zero_check import tolerance
from thresher.training.loop import MetricLogger
from thresher.training.supervisor import Supervisor

if TYPE_CHECKING:
    from thresher.observability.trackers.console import ConsoleTracker

logger = logging.getLogger(__name__)


def describe_unfinished_stop(config: DPOConfig) -> str:
    """What a run that exits after graceful_stop_timeout leaves behind, and what to do."""
    saved = list_checkpoints(build_checkpoint_manager(config).root)
    since = f"since step {step_of(saved[-1])}" if saved else "at all"
    return (
        f"not finished after {config.graceful_stop_timeout:g} s; nothing saved {since}; raise graceful_stop_timeout, "
        "or set save_steps to save more often"
    )


def build_supervisor(config: DPOConfig, damaged: DamagedCheckpoints, clock: PhaseClock) -> Supervisor:
    checkpoints = build_checkpoint_manager(config)
    return Supervisor(
        config.max_restarts if config.uses_ray else 0,
        latest_checkpoint=lambda: checkpoints.find_to_resume("auto", damaged),
        recovery_log=config.log_dir / RECOVERIES,
        damaged=damaged,
        clock=clock,
    )


def build_tracking(
    config: DPOConfig, console: ConsoleTracker | None, callbacks: CallbackTracker | None = None
) -> Trackers:
    # only the process that leads a run has trackers
    from thresher.observability.trackers.libraries import make_trackers

    settings = config.tracker_kwargs.model_dump()
    return make_trackers(
        config.track_with, settings, console=console, callbacks=callbacks, exports_on_ray=config.uses_ray
    )


def build_callbacks(config: DPOConfig, callbacks: Sequence[object]) -> CallbackTracker | None:
    """Make a tracker of callbacks of transformers' Trainer, one for all attempts of a run; None without callbacks."""
    if not callbacks:
        return None
    root = build_checkpoint_manager(config).root
    return CallbackTracker(
        callbacks,
        SimpleNamespace(**foreign().trl_arguments(config)),
        config.stop_file,
        lambda: {step: path for path in list_checkpoints(root) if (step := step_of(path)) is not None},
    )


@contextlib.contextmanager
def track(trackers: Trackers, inputs: RunInputs, *, resume_step: int | None) -> Iterator[StepLog]:
    """Open the trackers for the duration of a run and close them with its outcome; yield the log of skipped steps."""
    config, plan, values = inputs.config, inputs.plan, inputs.config.model_dump(mode="json")
    if inputs.max_tokens is not None:  # trackers show the chosen budget as the config's
        values["actor_train"]["training_args"]["max_tokens_per_micro_batch"] = inputs.max_tokens
    run = RunInfo(
        exp_name=config.exp_name,
        run_dir=config.log_dir,
        config=redact(values),
        total_steps=plan.num_steps,
        total_pairs=plan.num_visits,
        unit=inputs.train.unit,
        health_from=None
        if config.health == "off"
        else pairs_before_comparison(plan.pairs_per_step * config.logging_steps),
    )
    # a checkpoint of a different directory has its log there
    if resume_step is not None and resume_step > 0 and list_checkpoints(build_checkpoint_manager(config).root):
        with translate_os_errors():
            holes = find_holes(run.run_dir / METRICS, resume_step, config.logging_steps)
        if holes is not None:
            logger.warning("%s", holes)
    trackers.start(run, resume_step)
    try:
        yield StepLog(run.run_dir / SKIPPED_STEPS, resume_step)
    except BaseException as error:
        # SystemExit: a second signal while the run stops
        is_requested = isinstance(error, (KeyboardInterrupt, SystemExit, RunStopped, RescaleRequested))
        with contextlib.suppress(UserError):  # an error while closing must not hide the one that ended the run
            trackers.close("interrupted" if is_requested else "failed")
        raise
    trackers.close("finished")


def run_facts(inputs: RunInputs, devices: str) -> dict[str, str]:
    """The facts that describe a run to people, by name."""
    config, plan, validation, mode = inputs.config, inputs.plan, inputs.validation, inputs.mode
    epochs, unit = f"{plan.epoch_of(plan.num_steps):.3g}", inputs.train.unit
    mixture = describe_mixture(inputs.train, plan)
    held_out = "held out " if config.validation and config.validation.split else ""
    for_validation = f", {len(validation):,} {held_out}for validation" if validation else ""
    return {
        "model": f"{config.policy_path} in {config.actor_train.model_args.dtype}",
        "parameters": _describe_parameters(*inputs.num_parameters, config.actor_train.model_args),
        "data": f"{len(inputs.train):,} {unit}{for_validation}",
        **({} if mixture is None else {"mixture": mixture}),
        "loss": inputs.objective.describe(),
        "steps": (
            f"{plan.num_steps:,} steps of {plan.pairs_per_step} {unit} ({epochs} epoch{'' if epochs == '1' else 's'})"
        ),
        "reference": mode if config.reference_path == config.policy_path else f"{mode}, {config.reference_path}",
        "layout": inputs.layout.name,
        "device": devices,
    }


def summarize_run(facts: Mapping[str, str], plan: Plan, checkpoint: Path | None) -> list[str]:
    """Summarize a run that is about to start, one fact per line."""
    lines = [f"{name:<12}{fact}" for name, fact in facts.items()]
    if checkpoint is not None and read_manifest(checkpoint).step >= plan.num_steps:
        lines.append(f"{checkpoint} has completed all steps; set a different output_dir to train again")
    elif checkpoint is not None:
        lines.append(f"resuming from {checkpoint}")
    return lines


def _describe_parameters(total: int, trained: int, args: ModelArgs) -> str:
    if trained == total:
        return f"{total:,}, all trained"
    lora = "" if args.lora_rank is None else f": LoRA of rank {args.lora_rank}"
    if args.adapter_name_or_path is not None:
        lora = f": LoRA from {args.adapter_name_or_path}"
    return f"{total:,}, of which {trained:,} ({trained / total:.3%}) are trained{lora}"


def describe_run(inputs: RunInputs, facts: Mapping[str, str]) -> None:
    """Write `run.json` for `thresher report`: facts, config, data reports and environment, with secrets masked."""
    config, plan = inputs.config, inputs.plan
    is_held_out = config.validation is not None and config.validation.split is not None
    description = {
        "exp_name": config.exp_name,
        "num_steps": plan.num_steps,
        "pairs_per_step": plan.pairs_per_step,
        "facts": facts,
        "config": config.model_dump(mode="json"),
        # validation pairs that were held out are counted in the report of the training file
        "data": {
            "train": _describe_stores(inputs.train, has_report=True),
            "validation": _describe_stores(inputs.validation, has_report=not is_held_out),
        },
        "environment": environment(),
    }
    text = json.dumps(redact(description), ensure_ascii=False, indent=1)
    with translate_os_errors():
        durable.replace(config.log_dir / DESCRIPTION, text.encode("utf-8", errors="replace"))


def _describe_stores(stores: Stores | None, *, has_report: bool) -> dict[str, Any] | None:
    if stores is None:
        return None
    described = {name: _describe_store(store, has_report=has_report) for name, store in stores.parts.items()}
    if "" in described:
        return described[""]
    return {"kind": stores.kind, "pairs": len(stores), "report": None, "parts": described}


def _describe_store(store: ExampleStore, *, has_report: bool) -> dict[str, Any]:
    try:
        report = report_of(store).to_json() if has_report else None
    except UserError:  # the run has warned about it
        report = None
    return {"kind": store.kind, "pairs": len(store), "report": report}


def build_history(inputs: RunInputs) -> History:
    """What the health rules know about a run before its first step."""
    config, objective, columns = inputs.config, inputs.objective, inputs.train.columns_in_use
    starts_at_reference = objective.needs_reference and same_initial_weights(config)
    has_constant_loss = starts_at_reference and not {"weight", "margin"} & set(columns)
    try:
        reports = [report_of(part) for part in inputs.train.parts.values()]
        duplicates = sum(each.count for report in reports for each in report.findings if each.name == "duplicates")
        num_pairs = sum(report.pairs_kept for report in reports)
    except UserError:  # a damaged report, which the run has warned about
        duplicates, num_pairs = 0, len(inputs.train)
    return History(
        total_steps=inputs.plan.num_steps,
        num_training_pairs=num_pairs,
        duplicates=duplicates,
        initial_loss=objective.zero_margin_loss if has_constant_loss else None,
        starts_at_reference=starts_at_reference,
        logp_noise=tolerance(DTYPES[config.actor_train.model_args.dtype], "other mesh", num_tokens=1),
        compares_sides=any(loss.compares_sides for loss, _ in objective.terms),
        num_validation_pairs=0 if inputs.validation is None else len(inputs.validation),
        refused=refused_settings(config, inputs.train),
    )


def check_not_stopped(config: DPOConfig, checkpoint: Path | None) -> None:
    """Raise if a health rule stopped the run at this checkpoint and nothing has changed since."""
    if checkpoint is None or config.health != "stop":
        return
    step = read_manifest(checkpoint).step
    rules = rules_that_stopped(config.log_dir, step)
    if rules and not config_changes(checkpoint, config):
        raise HealthStopped(step, rules)


@contextlib.contextmanager
def watch_health(
    inputs: RunInputs, log: MetricLogger, checkpoint: Path | None, *, resume_step: int | None
) -> Iterator[MetricLogger]:
    """Yield a log that applies the health rules; the log itself, which must be open, with `health: off`."""
    config = inputs.config
    if config.health == "off":
        yield log
        return
    directory, stop = config.log_dir, config.stop_file
    stopped_by = [] if checkpoint is None else rules_that_stopped(directory, read_manifest(checkpoint).step)
    events = StepLog(directory / HEALTH, resume_step)
    if checkpoint is not None and stopped_by:
        changes = config_changes(checkpoint, config) or [f"health is {config.health}"]
        events.write({"step": read_manifest(checkpoint).step, "continued": changes})
    monitor = HealthMonitor(log.log, build_history(inputs), events, stop.touch if config.health == "stop" else None)
    monitor.start(directory / METRICS, is_new=resume_step in (None, START_OVER))
    try:
        yield monitor
    except RunStopped as stopped:
        if not monitor.fired or stopped.step is None:
            raise
        raise HealthStopped(stopped.step, monitor.fired) from stopped
    except Exception:
        if monitor.fired:  # a restart repeats the steps of the event, or stops at once
            stop.unlink(missing_ok=True)
        raise
    if monitor.fired:  # in one of the last steps: there was nothing left to stop
        events.write({"step": inputs.plan.num_steps, "continued": ["all steps were done"]})
