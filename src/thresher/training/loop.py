"""The training loop: runs steps, logging, evaluation and checkpointing in a fixed order for any `Trainable`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

from thresher.config import DPOConfig
from thresher.data.batching.plan import Plan
from thresher.errors import RunStopped, UserError
from thresher.observability.details import DETAIL
from thresher.observability.trackers.jsonl import StepLog
from thresher.sampling.answers import SampledAnswers
from thresher.training.records import EvaluatedExamples, SkippedStep
from thresher.training.trainer import EvaluationProgress, EvaluationRecord, Record

logger = logging.getLogger(__name__)

ShowProgress = Callable[[str, int, int], None]
KeepPairs = Callable[[int, EvaluatedExamples], None]
KeepAnswers = Callable[[int, SampledAnswers], Mapping[str, float]]


class Trainable(Protocol):
    """Makes the steps: a group of ranks, or one trainer."""

    @property
    def step(self) -> int:
        """Completed steps when the run begins."""
        ...

    @property
    def last_evaluation(self) -> Mapping[str, float]:
        """The latest evaluation when the run begins."""
        ...

    def run(self, until: int) -> Iterator[Record]:
        """Train up to a step, or until a stop is requested; yield the records to log, in order."""
        ...

    @property
    def stopped_at(self) -> int | None:
        """The last complete step when the last `run` stopped on request; None if it reached its end."""
        ...

    def evaluate_and_record(self) -> Iterator[EvaluationRecord]:
        """Evaluate; yield the progress now and then, values of some pairs, answers, and the metrics at the end."""
        ...

    def save(self) -> object:
        """Save a checkpoint of the current step; it may be published later."""
        ...

    def wait_for_saves(self) -> object:
        """Wait until every checkpoint is published."""
        ...


class MetricLogger(Protocol):
    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...


def fit(
    trainable: Trainable,
    config: DPOConfig,
    plan: Plan,
    log: MetricLogger,
    skipped_steps: StepLog,
    *,
    show_progress: ShowProgress = lambda what, done, total: None,  # called during long evaluations
    keep_examples: KeepPairs = lambda step, pairs: None,  # called with values of single pairs at each evaluation
    keep_answers: KeepAnswers = lambda step, answers: {},  # called with sampled answers; returns metrics of them
) -> dict[str, float]:
    """Train to the end of the plan, and evaluate and save as the config says; return the last evaluation.

    A checkpoint is saved after the metrics of all its steps are logged; a resumed run would miss them otherwise.
    All checkpoints are published when this returns.
    """
    num_steps = plan.num_steps
    # all epochs have the same number of steps, so an epoch is an interval like others; 0: only after the last step
    per_epoch = {"epoch": plan.steps_per_epoch, "no": 0}
    eval_steps = per_epoch.get(config.eval_strategy, config.eval_steps)
    save_steps = per_epoch.get(config.save_strategy, config.save_steps)

    def evaluate_and_log() -> dict[str, float]:
        started = time.perf_counter()
        metrics = evaluate(trainable, step, show_progress, keep_examples, keep_answers)
        if metrics:
            log.log(step, metrics | {"time/evaluate": time.perf_counter() - started})
            line = "  ".join(f"{name} {value:.6g}" for name, value in metrics.items())
            logger.info("evaluation after step %d: %s", step, line, extra=DETAIL)
        return metrics

    step, last = trainable.step, dict(trainable.last_evaluation)
    saved = step  # a run that continues has a checkpoint of its first step, and a new one has nothing to save yet
    if step == 0 and config.eval_on_start:
        last = evaluate_and_log()
    while step < num_steps:
        next_evaluation = _next_due_step(eval_steps, step, num_steps)
        next_checkpoint = _next_due_step(save_steps, step, num_steps)
        step = min(next_evaluation, next_checkpoint)
        for at, record in trainable.run(step):
            if isinstance(record, SkippedStep):
                _record_skipped(at, record, skipped_steps)
            else:
                log.log(at, record)
        stopped_at = trainable.stopped_at
        step = step if stopped_at is None else stopped_at
        if step == next_evaluation:
            last = evaluate_and_log()
        if step != saved and (step == next_checkpoint or stopped_at is not None):
            trainable.save()
            saved = step
        if stopped_at is not None and step < num_steps:
            trainable.wait_for_saves()
            raise RunStopped(step)
    trainable.wait_for_saves()
    return last


def _next_due_step(every: int, step: int, num_steps: int) -> int:
    """The next multiple of `every` after `step`, at most the last step; the last step if `every` is 0."""
    return min((step // every + 1) * every, num_steps) if every else num_steps


def _record_skipped(step: int, record: SkippedStep, skipped: StepLog) -> None:
    skipped.write(record.to_json(step))
    if record.reason == "overflow":
        logger.info("step %d skipped: its gradient overflows fp16; the loss scale is now %g", step, record.loss_scale)
        return
    numbers = [str(pair.number) for pair in record.pairs]
    more = f" and {len(numbers) - 3} more" if len(numbers) > 3 else ""
    logger.warning(
        "step %d skipped: its %s is not finite (pair%s %s%s); see %s",
        step,
        record.reason,
        "s" if len(numbers) > 1 else "",
        ", ".join(numbers[:3]),
        more,
        skipped.path,
    )
    if record.ends_run:
        raise UserError(
            f"the loss or gradient was not finite in {record.consecutive} steps in a row, up to step {step}; lower the "
            f"learning rate, check the pairs of these steps listed in {skipped.path}, or raise "
            "max_consecutive_skipped_steps"
        )


def evaluate(
    trainable: Trainable,
    step: int,
    show_progress: ShowProgress = lambda what, done, total: None,
    keep_examples: KeepPairs = lambda step, pairs: None,
    keep_answers: KeepAnswers = lambda step, answers: {},
) -> dict[str, float]:
    """Evaluate after a step; the result is empty without a validation set and samples."""
    metrics: dict[str, float] = {}
    for record in trainable.evaluate_and_record():
        if isinstance(record, EvaluationProgress):
            show_progress(f"evaluating after step {step}, batches", record.done, record.total)
        elif isinstance(record, EvaluatedExamples):
            keep_examples(step, record)
        elif isinstance(record, SampledAnswers):
            metrics |= keep_answers(step, record)
        else:
            metrics |= record
    return metrics
