"""DPOTrainer: one rank's steps, evaluation and checkpoints. It knows no Ray and no engine; `loop` says when."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from thresher.checkpoint.collective_save import Write
from thresher.checkpoint.json_io import load_json, save_json
from thresher.checkpoint.manager import AsyncSaver, CheckpointManager
from thresher.checkpoint.rng import capture_rng, merge_rng, restore_rng_of_rank
from thresher.checkpoint.sharded import HostBuffers
from thresher.checkpoint.state import load_state, save_state
from thresher.data.batching.micro_batches import MicroBatching
from thresher.data.batching.plan import PairIds, Plan
from thresher.data.pair import PairBatch
from thresher.data.store.reader import PairStore
from thresher.distributed.groups import DataParallelGroup, Metrics
from thresher.errors import CheckpointError
from thresher.losses.objective import Objective
from thresher.losses.pairs import ChosenRejectedLogps
from thresher.observability.heartbeat import set_activity
from thresher.observability.memory import memory_metrics
from thresher.observability.throughput import NUM_SPANS, ThroughputMeter, TraceSpan
from thresher.strategies.accumulate import evaluate_objective
from thresher.strategies.strategy import MicroBatch, TrainStrategy
from thresher.training.lr_schedule import LRSchedule
from thresher.training.skipped_steps import SkippedStep, describe_skipped
from thresher.training.state import TrainerState


class ReferenceScorer(Protocol):
    """Give the reference's logps of a micro-batch; seconds_per_pair is what was spent on them in advance."""

    @property
    def seconds_per_pair(self) -> float: ...

    def logps(self, batch: PairBatch) -> ChosenRejectedLogps: ...


@dataclass(frozen=True)
class ScoredDataset:
    """Pairs with the reference that belongs to them; reference is None for losses without one."""

    store: PairStore
    reference: ReferenceScorer | None


@dataclass(frozen=True)
class TrainerSettings:
    """How evaluation is cut, when metrics are due, when to give up, and whether training goes on during a save."""

    pairs_per_eval_batch: int
    logging_steps: int = 1
    max_consecutive_skipped_steps: int = 5
    seed: int = 0
    stop_file: Path | None = None
    async_save: bool = False


Record = tuple[int, dict[str, float] | SkippedStep]


class AuxiliaryState(Protocol):
    """Something beside the policy that lives in checkpoints, such as a synced reference."""

    def after_step(self, step: int) -> None: ...

    def tensors(self) -> Mapping[str, Mapping[str, Tensor]]:
        """What checkpoints keep, under the stem of its files; split over processes as the policy's weights."""
        ...

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
        schedule: LRSchedule,
        train: ScoredDataset,
        validation: ScoredDataset | None,
        settings: TrainerSettings,
        checkpoints: CheckpointManager,
        identity: Mapping[str, str | int],
        config: Mapping[str, Any],
        extra: AuxiliaryState | None = None,
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
        self._background = AsyncSaver(checkpoints, strategy.dp_group.world.clone_for_thread)
        self._identity = dict(identity)
        self._config = dict(config)
        self._extra = extra
        self.last_evaluation: dict[str, float] = {}
        self._last_eval_step = -1
        self._clock = ThroughputMeter()
        self.trace: deque[TraceSpan] = deque(maxlen=NUM_SPANS)
        self.stopped_at: int | None = None
        self.skipped: SkippedStep | None = None

    def run(self, until: int) -> Iterator[Record]:
        """Train up to a step of the plan, or until told to stop; yield what is to be logged, when it is due.

        It ends as well after a skipped step that says so: an error, which every rank would raise, could overtake it.
        """
        while self.state.step < until:
            self.training_step()
            if self.skipped is not None:
                yield self.state.step, self.skipped
                if self.skipped.ends_run:
                    return
            is_told_to_stop = self._is_told_to_stop()
            is_due = self.state.step % self._settings.logging_steps == 0 or self.state.step == self.plan.num_steps
            if is_due:
                yield self.state.step, self._take_log()
            if is_told_to_stop:
                self.stopped_at = self.state.step
                return

    def training_step(self) -> Metrics:
        """Make the next optimizer step of the plan; `skipped` tells if it was not made, and why."""
        self._background.check()
        pair_ids = self.plan.pair_ids(self.state.step)
        set_activity(f"step {self.state.step + 1}: waiting for the reference")
        with self._clock.waiting():  # for the reference; reading tokens is next to nothing beside it
            micro_batches = list(self._micro_batches(pair_ids))
        set_activity(f"step {self.state.step + 1}: training")
        started = time.time()
        outcome = self.strategy.train_step(
            micro_batches,
            self.objective,
            num_pairs_in_step=len(pair_ids),
            learning_rate=self._schedule(self.state.step),
        )
        self.state.record_step(len(pair_ids), outcome)
        if outcome.nonfinite is None:
            self.skipped = None
            self.objective = self.objective.after_step(outcome.metrics)
        else:
            most = self._settings.max_consecutive_skipped_steps
            self.skipped = describe_skipped(outcome.nonfinite, self.state, self._train.store, pair_ids, most)
        if self._extra is not None:
            self._extra.after_step(self.state.step)
        self._clock.record_step(len(pair_ids), outcome.tokens.useful)
        self.trace.append(TraceSpan("train", self.state.step - 1, started, time.time()))
        return outcome.metrics

    def evaluate(self) -> dict[str, float]:
        """Measure the whole validation set, tail included; training randomness is left untouched."""
        if self._validation is None:
            return {}
        with torch.random.fork_rng():
            torch.manual_seed(self._settings.seed)
            batches = self._validation_batches()
            metrics = evaluate_objective(self._score, batches, self.objective, self.strategy.dp_group)
        return {f"eval/{name}": metric.mean for name, metric in metrics.items()}

    def evaluate_and_record(self) -> dict[str, float]:
        """Evaluate at this very step and keep the result: a checkpoint of this step is judged by it."""
        set_activity(f"evaluating after step {self.state.step}")
        with self._clock.paused():
            self.last_evaluation, self._last_eval_step = self.evaluate(), self.state.step
        return self.last_evaluation

    def save(self) -> Path:
        """Save a checkpoint of this very step and return its place; all processes take part.

        With async_save it is only copied here, and may be published later, but before `finish` is over.
        """
        set_activity(f"saving step {self.state.step}")
        with self._clock.paused():
            self._background.wait()
            step, directory = self.state.step, self._checkpoints.path_for(self.state.step)
            measured = self.last_evaluation if self._last_eval_step == step else {}
            # after the last step there is nothing to hide it behind
            if self._settings.async_save and step < self.plan.num_steps:
                self._background.submit(step, self._capture(self._background.copies), measured)
            else:
                self._checkpoints.save(step, self._capture(None), measured, self.strategy.dp_group.world)
            return directory

    def wait_for_saves(self) -> None:
        """Return when every save is published."""
        self._background.wait()

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
        self.last_evaluation = values["last_eval"]
        if self._extra is not None:
            self._extra.load(checkpoint)
        world = self.strategy.dp_group.world
        return restore_rng_of_rank(load_state(checkpoint, "rng"), world.rank, world.size)

    def first_micro_batch(self) -> MicroBatch | None:
        """The next pairs that this rank trains on, for checks at start-up; None where the step has none for it."""
        return next(self._micro_batches(self.plan.pair_ids(self.state.step)), None)

    def restart_clock(self) -> None:
        """Let the rates begin here."""
        self._clock.restart()

    def _micro_batches(self, pair_ids: PairIds) -> Iterator[MicroBatch]:
        ranks = self.strategy.dp_group
        for ids in _in_step(self._micro_batching.split(pair_ids, ranks.rank, ranks.size), ranks):
            yield _read_micro_batch(self._train, ids)

    def _validation_batches(self) -> Iterator[MicroBatch]:
        assert self._validation is not None  # noqa: S101
        ranks = self.strategy.dp_group
        num_pairs, size = len(self._validation.store), self._settings.pairs_per_eval_batch
        for ids in _in_step(evaluation_batches(num_pairs, size, ranks.rank, ranks.size), ranks):
            yield _read_micro_batch(self._validation, ids)

    def _score(self, batch: PairBatch) -> ChosenRejectedLogps:
        return self.strategy.score(batch, with_squared_probs=self.objective.needs_squared_probs)

    def _is_told_to_stop(self) -> bool:
        """Ask the first process; a file may appear for one rank before another sees it."""
        file, world = self._settings.stop_file, self.strategy.dp_group.world
        if file is None:
            return False
        (told,), _ = world.all_reduce([float(world.rank == 0 and file.exists())])
        return told > 0

    def _take_log(self) -> dict[str, float]:
        return (
            self.state.pop_means()
            | {
                "lr": self._schedule(self.state.step - 1),
                "grad_norm": self.state.grad_norm,
                "epoch": self.plan.epoch_of(self.state.step),
                "skipped_steps": self.state.skipped_steps,
                "pairs_seen": self.state.pairs_seen,
                "tokens/seen": self.state.useful_tokens_seen,
            }
            | self._clock.pop_rates(self._train.reference.seconds_per_pair if self._train.reference else None)
            | memory_metrics()
        )

    def _capture(self, copies: HostBuffers | None) -> Write:
        """Take all that a checkpoint of this step holds; rank 0 has what is not split."""
        write_policy = self.strategy.snapshot({} if self._extra is None else self._extra.tensors(), copies)
        streams = self.strategy.dp_group.world.gather_object(capture_rng())
        progress = {
            "state": self.state.to_json(),
            "objective": self.objective.state(),
            "identity": self._identity,
            "last_eval": self.last_evaluation,
        }

        def write(directory: Path) -> list[str]:
            names = list(write_policy(directory))
            if streams is None:
                return names
            names += save_state(directory, "rng", merge_rng(streams))
            for name, values in (("trainer.json", progress), ("config.json", self._config)):
                save_json(directory / name, values)
                names.append(name)
            return names

        return write


def evaluation_batches(num_pairs: int, pairs_per_batch: int, rank: int, num_ranks: int) -> list[PairIds]:
    """Name the held-out pairs of each of a rank's batches; over all ranks, each pair is in exactly one."""
    share = np.arange(rank, num_pairs, num_ranks, dtype=np.int64)
    return [share[start : start + pairs_per_batch] for start in range(0, len(share), pairs_per_batch)]


def _in_step(batches: Sequence[PairIds], ranks: DataParallelGroup) -> list[PairIds]:
    """Add batches without pairs where ranks that must keep step have more of them than we."""
    missing = ranks.max_over_ranks(len(batches)) - len(batches)
    return [*batches, *[np.zeros(0, dtype=np.int64)] * missing]


def _read_micro_batch(split: ScoredDataset, ids: np.ndarray[tuple[int], np.dtype[np.int64]]) -> MicroBatch:
    pairs = split.store.read(ids)
    return MicroBatch(pairs, None if split.reference is None else split.reference.logps(pairs))
