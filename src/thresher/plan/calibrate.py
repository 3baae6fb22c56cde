"""Step time on the workers of a config: the sizes of a few real steps, and a fit of their seconds for other steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import ceil
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from thresher.builders.data import find_store
from thresher.config import DataArgs, DPOConfig
from thresher.errors import UserError
from thresher.plan.estimate import Estimate
from thresher.plan.pairs import find_lengths
from thresher.plan.workload import Step

_NUM_STEPS = 6
_NUM_WARM_UP_STEPS = 1  # allocates optimizer states and buffers
_MAX_ROWS_TO_PREPARE = 256

TimeSteps = Callable[[Sequence[DPOConfig], int], list[list[float]]]


@dataclass(frozen=True)
class StepWork:
    """What the time of a step depends on, for its slowest process: micro-batches in sequence, and FLOPs."""

    micro_batches: float
    flops: float


@dataclass(frozen=True)
class TimedStep:
    work: StepWork
    pairs: int
    seconds: float


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step = per_step + per_micro_batch x micro-batches + per_flop x FLOPs; none is negative."""

    per_step: float
    per_micro_batch: float
    per_flop: float

    def predict(self, work: StepWork) -> float:
        return self.per_step + self.per_micro_batch * work.micro_batches + self.per_flop * work.flops

    @classmethod
    def fit(cls, steps: Sequence[TimedStep]) -> StepTime:
        """Least squares of the relative error. FLOPs always count; the other terms if they are not negative."""
        rows = [[1.0, step.work.micro_batches, step.work.flops] for step in steps]
        # relative: the prediction of a short step should be as good as that of a long one
        weighted = np.array(rows) / np.array([[step.seconds] for step in steps])
        best, least = (0.0, 0.0, 0.0), np.inf
        for others in (names for size in (2, 1, 0) for names in combinations((0, 1), size)):
            columns = [*others, 2]
            found, *_ = np.linalg.lstsq(weighted[:, columns], np.ones(len(steps)), rcond=None)
            error = float(np.square(weighted[:, columns] @ found - 1).sum())
            if (found >= 0).all() and error < least:
                terms = dict(zip(columns, found.tolist(), strict=True))
                best, least = (terms.get(0, 0.0), terms.get(1, 0.0), terms[2]), error
        return cls(*best)


@dataclass(frozen=True)
class Calibration:
    """Measured steps, the fit, and the mean seconds per step that it predicts for a run."""

    steps: tuple[TimedStep, ...]
    fit: StepTime
    step_seconds: float


def calibrate(estimate: Estimate, time_steps: TimeSteps) -> Calibration:
    """Time a few small steps of a config and predict its own. time_steps: returns the seconds of each step."""
    with TemporaryDirectory(prefix="thresher-plan-") as directory:
        configs = [_short_steps(estimate, Path(directory), size) for size in _sizes(estimate)]
        seconds = time_steps(configs, _NUM_STEPS)
        timed = [_timed(estimate, config, each) for config, each in zip(configs, seconds, strict=True)]
    fit = StepTime.fit([_typical(steps) for steps in timed])
    predicted = mean(fit.predict(work) for work in step_works(estimate))
    return Calibration(tuple(step for steps in timed for step in steps), fit, predicted)


def _typical(steps: Sequence[TimedStep]) -> TimedStep:
    """A step of mean work and median speed: other processes of a machine make single steps slow."""
    work = StepWork(mean(step.work.micro_batches for step in steps), mean(step.work.flops for step in steps))
    return TimedStep(work, steps[0].pairs, work.flops * median(step.seconds / step.work.flops for step in steps))


def _timed(estimate: Estimate, config: DPOConfig, seconds: Sequence[float]) -> list[TimedStep]:
    pairs = find_lengths(config, estimate.parts.tokenizer, estimate.pairs_per_step)
    small = Estimate(config, estimate.cluster, estimate, pairs=pairs)
    works = step_works(small)
    if len(works) != len(seconds):
        raise UserError(
            f"--calibrate needs {small.workload.plan.pairs_per_step * _NUM_STEPS} training pairs for {_NUM_STEPS} "
            f"steps, and there are {small.workload.plan.num_pairs}"
        )
    steps = [TimedStep(work, small.pairs_per_step, took) for work, took in zip(works, seconds, strict=True)]
    return steps[_NUM_WARM_UP_STEPS:]


def step_works(estimate: Estimate) -> list[StepWork]:
    """The work of each sampled step."""
    return [_work(estimate, step) for step in estimate.workload.steps]


def _work(estimate: Estimate, step: Step) -> StepWork:
    pp, count = estimate.dims.pp, len(step.micro_batches)
    # a pipeline runs at least one micro-batch per stage, and the last stage waits for the first ones
    in_sequence = count if pp == 1 else max(count, pp) + pp - 1
    stages = [estimate.stage(index) for index in {0, pp // 2, pp - 1}]
    slowest = max(estimate.flops_of_step(stage, step).total for stage in stages)
    return StepWork(in_sequence, slowest * in_sequence / max(1, count))


@dataclass(frozen=True)
class _Size:
    """Pairs per data-parallel rank in a step; are_single: each in a micro-batch of its own, not in those of the run."""

    pairs: int
    are_single: bool


def _sizes(estimate: Estimate) -> list[_Size]:
    """Steps of one pair, of several micro-batches, and of two micro-batches of the run, whose FLOPs are faster.

    The last has fewer pairs if the data is too small for enough of them.
    """
    ranks = estimate.dims.num_data_ranks
    pairs_in_step = estimate.pairs_per_step / ranks
    micro_batches = mean(len(step.micro_batches) for step in estimate.workload.steps)
    wanted = min(pairs_in_step, 2 * pairs_in_step / max(1, micro_batches))
    in_data = min(estimate.workload.plan.num_pairs, _MAX_ROWS_TO_PREPARE) // (_NUM_STEPS * ranks)
    return [_Size(1, True), _Size(3, True), _Size(max(3, min(ceil(wanted), in_data)), False)]


def _short_steps(estimate: Estimate, directory: Path, size: _Size) -> DPOConfig:
    """The config with steps of a few pairs per data-parallel rank and no evaluation; its files are in a directory."""
    config, role = estimate.config, estimate.config.actor_train
    training: dict[str, Any] = {
        "global_batch_size": size.pairs * estimate.dims.num_data_ranks,
        "gradient_accumulation_steps": 1,
    }
    if size.are_single:
        training["per_device_train_batch_size"] = 1
        if estimate.parts.layout.needs_pair_attention:
            training["max_tokens_per_micro_batch"] = 1  # a pair above the budget gets a micro-batch to itself
    store = find_store(config, role.data_args, estimate.parts.tokenizer)
    samples = min(role.data_args.max_samples or _MAX_ROWS_TO_PREPARE, _MAX_ROWS_TO_PREPARE)
    data = (
        role.data_args.model_copy(update={"max_samples": samples})
        if store is None
        else DataArgs(store=str(Path(store.path).resolve()))
    )
    role = role.model_copy(
        update={"data_args": data, "training_args": role.training_args.model_copy(update=training)},
    )
    return config.model_copy(
        update={
            "actor_train": role,
            "reference": config.reference.model_copy(update={"cache_dir": str(directory / "reference")}),
            "output_dir": str(directory / f"{size.pairs}-{'single' if size.are_single else 'own'}"),
            "cache_dir": str(directory / "cache"),
            "logging_dir": None,
            "validation": None,
            "max_steps": _NUM_STEPS,
            "logging_steps": 1,
            "track_with": [],
            "resume_from_checkpoint": None,
            "runtime": "auto" if config.runtime == "torchrun" else config.runtime,
        }
    )
