"""DPOTrainer: one rank's steps, evaluation and fit(). It knows no Ray, no engine and no number of processes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from thresher.checkpoint.exact_json import load_json, save_json
from thresher.checkpoint.keeper import CheckpointKeeper
from thresher.checkpoint.rng import capture_rng, restore_rng
from thresher.checkpoint.state import load_state, save_state
from thresher.data.batch import PairBatch
from thresher.data.micro_batches import MicroBatching
from thresher.data.plan import PairIds, Plan
from thresher.data.store import PairStore
from thresher.errors import CheckpointError, UserError
from thresher.losses.metrics import MetricSum
from thresher.losses.objective import Objective
from thresher.losses.pairs import SidesLogps
from thresher.observe.memory import memory_metrics
from thresher.observe.step_clock import StepClock
from thresher.schedule import Schedule
from thresher.strategies.accumulate import evaluate_objective
from thresher.strategies.strategy import Metrics, MicroBatch, TrainStrategy
from thresher.trainer_state import TrainerState


class ReferenceScorer(Protocol):
    """Give the reference's logps of a micro-batch; seconds_per_pair is what was spent on them in advance."""

    @property
    def seconds_per_pair(self) -> float: ...

    def logps(self, batch: PairBatch) -> SidesLogps: ...


@dataclass(frozen=True)
class Split:
    """Pairs with the reference that belongs to them; reference is None for losses without one."""

    store: PairStore
    reference: ReferenceScorer | None


@dataclass(frozen=True)
class FitSettings:
    """When to log, evaluate, save and give up. Zero means: at the end only."""

    pairs_per_eval_batch: int
    logging_steps: int = 1
    eval_steps: int = 0
    save_steps: int = 0
    eval_on_start: bool = False
    max_skipped_steps: int = 5
    seed: int = 0


class MetricLog(Protocol):
    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...


class Extra(Protocol):
    """Something beside the policy that lives in checkpoints, such as a synced reference."""

    def after_step(self, step: int) -> None: ...

    def save(self, directory: Path) -> None: ...

    def load(self, directory: Path) -> None: ...


class DPOTrainer:
    """Train a policy on the pairs of a plan."""

    def __init__(
        self,
        *,
        strategy: TrainStrategy,
        objective: Objective,
        plan: Plan,
        micro_batching: MicroBatching,
        schedule: Schedule,
        train: Split,
        validation: Split | None,
        settings: FitSettings,
        checkpoints: CheckpointKeeper,
        trackers: MetricLog,
        identity: Mapping[str, str | int],
        config: Mapping[str, Any],
        extra: Extra | None = None,
    ):
        self.strategy = strategy
        self.objective = objective
        self.plan = plan
        self.state = TrainerState()
        self._micro_batching = micro_batching
        self._schedule = schedule
        self._train = train
        self._validation = validation
        self._settings = settings
        self._checkpoints = checkpoints
        self._trackers = trackers
        self._identity = dict(identity)
        self._config = dict(config)
        self._extra = extra
        self._last_eval: dict[str, float] = {}
        self._last_eval_step = -1
        self._clock = StepClock()

    def fit(self) -> dict[str, float]:
        """Train to the end of the plan from wherever the state stands; return the last evaluation."""
        if self.state.step == 0 and self._settings.eval_on_start:
            self._evaluate_and_log()
        self._clock.restart()
        while self.state.step < self.plan.num_steps:
            self.training_step()
            if self._is_due(self._settings.logging_steps):
                self._log()
            if self._is_due(self._settings.eval_steps):
                self._evaluate_and_log()
            if self._is_due(self._settings.save_steps):
                self.save()
        return self._last_eval

    def training_step(self) -> Metrics:
        """Make the next optimizer step of the plan."""
        pair_ids = self.plan.pair_ids(self.state.step)
        outcome = self.strategy.train_step(
            list(self._micro_batches(pair_ids)),
            self.objective,
            num_pairs_in_step=len(pair_ids),
            learning_rate=self._schedule(self.state.step),
        )
        self.state.step += 1
        self.state.grad_norm = outcome.grad_norm
        if outcome.skipped:
            self._count_skipped()
        else:
            self.state.skipped_in_a_row = 0
            self.state.pairs_seen += len(pair_ids)
            self.state.useful_tokens_seen += outcome.tokens.useful
            self.state.add_to_window(outcome.metrics)
            self.state.add_to_window(
                {
                    "tokens/useful": MetricSum(outcome.tokens.useful, 1),
                    "tokens/padding": MetricSum(outcome.tokens.padding, 1),
                    "tokens/shared": MetricSum(outcome.tokens.shared, 1),
                }
            )
            self.objective = self.objective.advanced(outcome.metrics)
        if self._extra is not None:
            self._extra.after_step(self.state.step)
        self._clock.count(len(pair_ids), outcome.tokens.useful)
        return outcome.metrics

    def evaluate(self) -> dict[str, float]:
        """Measure the whole validation set, tail included; training randomness is left untouched."""
        if self._validation is None:
            return {}
        with torch.random.fork_rng():
            torch.manual_seed(self._settings.seed)
            metrics = evaluate_objective(self._score, self._validation_batches(), self.objective)
        return {f"eval/{name}": metric.mean for name, metric in self.strategy.reduce(metrics).items()}

    def save(self) -> Path:
        """Publish a checkpoint of this very step."""
        with self._clock.paused():
            measured = self._last_eval if self._last_eval_step == self.state.step else {}
            return self._checkpoints.save(self.state.step, self._write, measured)

    def resume(self, checkpoint: Path) -> list[str]:
        """Go on from a checkpoint as if the run had never stopped; return what could not be restored, if anything."""
        values = load_json(checkpoint / "trainer.json")
        for name, now in self._identity.items():
            if (then := values["identity"].get(name)) != now:
                raise CheckpointError(
                    f"{checkpoint} belongs to another run: its {name} is {then}, this run's is {now}; resume with the "
                    "same data, batch size, seed and reference, or set another output_dir"
                )
        self.strategy.load(checkpoint)
        self.state = TrainerState.from_json(values["state"])
        self.objective = self.objective.with_state(values["objective"])
        self._last_eval = values["last_eval"]
        if self._extra is not None:
            self._extra.load(checkpoint)
        return restore_rng(load_state(checkpoint, "rng"))

    def first_micro_batch(self) -> MicroBatch:
        """The first real pairs of the run, for checks at start-up."""
        return next(self._micro_batches(self.plan.pair_ids(self.state.step)))

    def _micro_batches(self, pair_ids: PairIds) -> Iterator[MicroBatch]:
        rank, num_ranks = self.strategy.data_rank, self.strategy.num_data_ranks
        for ids in self._micro_batching.cut(pair_ids, rank, num_ranks):
            yield _read_micro_batch(self._train, ids)

    def _validation_batches(self) -> Iterator[MicroBatch]:
        assert self._validation is not None  # noqa: S101
        rank, num_ranks = self.strategy.data_rank, self.strategy.num_data_ranks
        share = np.arange(rank, len(self._validation.store), num_ranks, dtype=np.int64)
        size = self._settings.pairs_per_eval_batch
        for start in range(0, len(share), size):
            yield _read_micro_batch(self._validation, share[start : start + size])

    def _score(self, batch: PairBatch) -> SidesLogps:
        return self.strategy.score(batch, with_log_collision=self.objective.needs_log_collision)

    def _is_due(self, every: int) -> bool:
        return self.state.step == self.plan.num_steps or (every > 0 and self.state.step % every == 0)

    def _log(self) -> None:
        self._trackers.log(
            self.state.step,
            self.state.take_window()
            | {
                "lr": self._schedule(self.state.step - 1),
                "grad_norm": self.state.grad_norm,
                "epoch": self.plan.epoch_of(self.state.step),
                "skipped_steps": self.state.skipped_steps,
                "pairs_seen": self.state.pairs_seen,
                "tokens/seen": self.state.useful_tokens_seen,
            }
            | self._clock.take(self._train.reference.seconds_per_pair if self._train.reference else 0.0)
            | memory_metrics(),
        )

    def _evaluate_and_log(self) -> None:
        with self._clock.paused():
            started = time.perf_counter()
            self._last_eval, self._last_eval_step = self.evaluate(), self.state.step
            if self._last_eval:
                seconds = {"time/evaluate": time.perf_counter() - started}
                self._trackers.log(self.state.step, self._last_eval | seconds)

    def _count_skipped(self) -> None:
        self.state.skipped_steps += 1
        self.state.skipped_in_a_row += 1
        if self.state.skipped_in_a_row >= self._settings.max_skipped_steps:
            raise UserError(
                f"the loss or gradient was not finite in {self.state.skipped_in_a_row} steps in a row, up to step "
                f"{self.state.step}; lower the learning rate, look at the pairs of these steps, or raise "
                "max_skipped_steps"
            )

    def _write(self, directory: Path) -> None:
        self.strategy.save(directory)
        save_state(directory, "rng", capture_rng())
        save_json(
            directory / "trainer.json",
            {
                "state": self.state.to_json(),
                "objective": self.objective.state(),
                "identity": self._identity,
                "last_eval": self._last_eval,
            },
        )
        save_json(directory / "config.json", self._config)
        if self._extra is not None:
            self._extra.save(directory)


def _read_micro_batch(split: Split, ids: np.ndarray[tuple[int], np.dtype[np.int64]]) -> MicroBatch:
    pairs = split.store.read(ids)
    return MicroBatch(pairs, None if split.reference is None else split.reference.logps(pairs))
