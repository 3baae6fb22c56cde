"""Health of a run: the facts that its rules need, and what `health: stop` means for the run and its resume."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from thresher.builders.checkpoints import config_changes
from thresher.builders.inputs import RunInputs
from thresher.builders.reference_mode import same_initial_weights
from thresher.builders.run import logging_dir, stop_file
from thresher.checkpoint.manifest import read_manifest
from thresher.config import DPOConfig
from thresher.data.prepare.report import report_of
from thresher.data.store.reader import PairStore
from thresher.errors import HealthStopped, RunStopped, UserError
from thresher.models.loading.load import DTYPES
from thresher.observability import log_files
from thresher.observability.health.monitor import HealthLog, HealthMonitor, rules_that_stopped
from thresher.observability.health.rules import RunFacts
from thresher.observability.trackers.tracker import START_OVER
from thresher.reference.step_zero_check import tolerance
from thresher.training.loop import MetricLogger


def run_facts(config: DPOConfig, inputs: RunInputs) -> RunFacts:
    objective, columns = inputs.objective, inputs.train.columns_in_use
    starts_at_reference = objective.needs_reference and same_initial_weights(config)
    has_constant_loss = starts_at_reference and not {"weight", "margin"} & set(columns)
    duplicates, num_pairs = _duplicates(inputs.train)
    return RunFacts(
        total_steps=inputs.plan.num_steps,
        num_pairs=num_pairs,
        duplicates=duplicates,
        initial_loss=objective.zero_margin_loss if has_constant_loss else None,
        starts_at_reference=starts_at_reference,
        logp_noise=tolerance(DTYPES[config.actor_train.model_args.dtype], "other axes", num_tokens=1),
        compares_sides=any(loss.compares_sides for loss, _ in objective.terms),
        num_validation_pairs=0 if inputs.validation is None else len(inputs.validation),
    )


def _duplicates(store: PairStore) -> tuple[int, int]:
    """Duplicates and pairs in the report of the store; a store with a damaged report counts as having none."""
    try:
        report = report_of(store)
    except UserError:  # reported when the store was opened
        return 0, len(store)
    return sum(each.count for each in report.findings if each.name == "duplicates"), report.pairs_kept


def check_not_stopped(config: DPOConfig, checkpoint: Path | None) -> None:
    """Raise if a health rule stopped the run at this checkpoint and nothing has changed since."""
    if checkpoint is None or config.health != "stop":
        return
    step = read_manifest(checkpoint).step
    rules = rules_that_stopped(logging_dir(config), step)
    if rules and not config_changes(checkpoint, config):
        raise HealthStopped(step, rules)


@contextlib.contextmanager
def watch_health(
    config: DPOConfig, inputs: RunInputs, log: MetricLogger, checkpoint: Path | None, *, resume_step: int | None
) -> Iterator[MetricLogger]:
    """Yield a log that applies the health rules; the log itself, which must be open, with `health: off`."""
    if config.health == "off":
        yield log
        return
    directory, stop = logging_dir(config), stop_file(config)
    stopped_by = [] if checkpoint is None else rules_that_stopped(directory, read_manifest(checkpoint).step)
    events = HealthLog(directory, resume_step)
    if checkpoint is not None and stopped_by:
        changes = config_changes(checkpoint, config) or [f"health is {config.health}"]
        events.write_continued(read_manifest(checkpoint).step, changes)
    monitor = HealthMonitor(log.log, run_facts(config, inputs), events, stop.touch if config.health == "stop" else None)
    monitor.start(directory / log_files.METRICS, is_new=resume_step in (None, START_OVER))
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
    if monitor.fired:  # in one of the last steps, so that there was nothing left to stop
        events.write_continued(inputs.plan.num_steps, ["all steps were done"])
