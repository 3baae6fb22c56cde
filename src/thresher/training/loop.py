"""The loop of a run: steps, evaluations and checkpoints in one order, whoever makes the steps."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from thresher.errors import RunStopped, UserError
from thresher.training.skipped_steps import SkippedStep, SkippedStepLog
from thresher.training.trainer import Record


class Trainable(Protocol):
    """Who makes the steps: a trainer in this process, or a cluster of them."""

    def run(self, until: int) -> Iterator[Record]:
        """Train up to a step, or until told to stop; yield what is to be logged, in order."""
        ...

    @property
    def stopped_at(self) -> int | None:
        """The step after which the last run was told to stop; None where it came to its end."""
        ...

    def evaluate_and_record(self) -> dict[str, float]:
        """Evaluate; empty where nothing is held out."""
        ...

    def save(self) -> object:
        """Save a checkpoint of the step that was reached; it may be published later."""
        ...

    def wait_for_saves(self) -> object:
        """Return when every checkpoint is published."""
        ...


class MetricLogger(Protocol):
    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...


@dataclass(frozen=True)
class LoopSettings:
    """When to evaluate and save. Zero means: at the end only."""

    eval_steps: int = 0
    save_steps: int = 0
    eval_on_start: bool = False


@dataclass(frozen=True)
class TrainingProgress:
    """Where a run stands before its next step: steps done, and the last evaluation."""

    step: int
    last_evaluation: Mapping[str, float]


def fit(
    trainable: Trainable,
    standing: TrainingProgress,
    num_steps: int,
    settings: LoopSettings,
    log: MetricLogger,
    skipped: SkippedStepLog,
) -> dict[str, float]:
    """Train to the end of the plan; return the last evaluation.

    A checkpoint appears only when the metrics of all its steps are logged. A resumed run would miss them otherwise.
    All have appeared when this returns.
    """
    step, last = standing.step, dict(standing.last_evaluation)
    if step == 0 and settings.eval_on_start:
        last = _measure(trainable, step, log)
    while step < num_steps:
        next_evaluation = _next(settings.eval_steps, step, num_steps)
        next_checkpoint = _next(settings.save_steps, step, num_steps)
        step = min(next_evaluation, next_checkpoint)
        for at, told in trainable.run(step):
            if isinstance(told, SkippedStep):
                _note_skipped(at, told, skipped)
            else:
                log.log(at, told)
        stopped_at = trainable.stopped_at
        step = step if stopped_at is None else stopped_at
        if step == next_evaluation:
            last = _measure(trainable, step, log)
        if step == next_checkpoint or stopped_at is not None:
            trainable.save()
        if stopped_at is not None and step < num_steps:
            trainable.wait_for_saves()
            raise RunStopped(step)
    trainable.wait_for_saves()
    return last


def _next(every: int, step: int, num_steps: int) -> int:
    """The first step after `step` at which something is due that is due every so many steps, and at the end."""
    return min((step // every + 1) * every, num_steps) if every else num_steps


def _note_skipped(step: int, told: SkippedStep, skipped: SkippedStepLog) -> None:
    skipped.write(step, told)
    if told.ends_run:
        raise UserError(
            f"the loss or gradient was not finite in {told.in_a_row} steps in a row, up to step {step}; lower the "
            f"learning rate, look at the pairs of these steps, which {skipped.path} names, or raise "
            "max_consecutive_skipped_steps"
        )


def _measure(trainable: Trainable, step: int, log: MetricLogger) -> dict[str, float]:
    started = time.perf_counter()
    measured = trainable.evaluate_and_record()
    if measured:
        log.log(step, measured | {"time/evaluate": time.perf_counter() - started})
    return measured
