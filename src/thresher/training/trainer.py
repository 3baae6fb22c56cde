"""RankTrainer: steps, evaluation and checkpoints of one rank, independent of Ray and the engine; `loop` calls it."""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from thresher.checkpoint.background import AsyncSaver, HostBuffers
from thresher.checkpoint.json_io import load_json, save_json
from thresher.checkpoint.manager import CheckpointManager
from thresher.checkpoint.save import Write
from thresher.checkpoint.state import capture_rng, load_state, merge_rng, restore_rng, restore_rng_of_rank, save_state
from thresher.config import DPOConfig
from thresher.data.batching.batches import MicroBatching, ScoringBatching
from thresher.data.batching.mismatched import Examples
from thresher.data.batching.plan import PairIds, Plan
from thresher.distributed.groups import PEER_TIMEOUT, Metrics, limit_collectives
from thresher.engines.accumulate import Evaluation, MicroBatch, StepDiscarded, empty_metrics
from thresher.engines.engine import TrainEngine
from thresher.errors import CheckpointError
from thresher.losses.metrics import mean_values, of_sets
from thresher.losses.objective import Objective
from thresher.observability.heartbeat import NUM_WARM_UP_OPERATIONS, end_activity, pace_after, set_activity
from thresher.observability.machine import memory_metrics
from thresher.observability.profile import StepProfiler
from thresher.observability.timing import NUM_SPANS, ThroughputMeter, TraceSpan
from thresher.redact import redact
from thresher.reference.scorers import Precomputed, Reference, ReferenceScorer
from thresher.sampling.answers import SampledAnswers
from thresher.sampling.sampler import AnswerSampler
from thresher.training.lr_schedule import LRSchedule
from thresher.training.read_ahead import ReadAhead
from thresher.training.records import (
    EvaluatedExamples,
    ExampleSampler,
    SkippedStep,
    TrainerState,
    describe_skipped,
)

logger = logging.getLogger(__name__)

# entries of a run's identity
POLICY_SETTINGS, REFERENCE_SETTINGS = "policy's config.json", "reference's config.json"
POLICY_WEIGHTS = "policy's frozen weights"
MIXTURE = "mixture"
QUANTIZATION = "quantization"


Record = tuple[int, dict[str, float] | SkippedStep]


class EvaluationProgress(NamedTuple):
    """Evaluated batches of this rank."""

    done: int
    total: int


EvaluationRecord = EvaluationProgress | EvaluatedExamples | SampledAnswers | dict[str, float]
_SECONDS_BETWEEN_PROGRESS = 2.0


class RankTrainer:
    """Train a policy on the pairs of a plan."""

    def __init__(
        self,
        config: DPOConfig,
        engine: TrainEngine,
        objective: Objective,
        plan: Plan,
        *,
        train: Examples,
        validation: Examples | None,
        reference: Reference,
        micro_batching: MicroBatching,
        eval_batching: ScoringBatching,
        schedule: LRSchedule,
        checkpoints: CheckpointManager,
        identity: Mapping[str, str | int],  # what a checkpoint must be resumed with
        sampler: AnswerSampler | None = None,
    ):
        self.config = config
        self.engine = engine
        self.objective = objective
        self.plan = plan
        self.state = TrainerState()
        self._train, self._validation = train, validation
        self._reference, self._synced = reference, reference.synced
        self._micro_batching, self._eval_batching = micro_batching, eval_batching
        # of these references alone, the logps of a step are on disk before it begins
        self._cached = reference.train if isinstance(reference.train, Precomputed) else None
        self._ahead = ReadAhead(self._read_step, engine.device)
        self._schedule = schedule
        self._checkpoints, self._identity = checkpoints, identity
        self._background = AsyncSaver(checkpoints, engine.dp_group.world.clone_for_thread)
        self._stop_file = config.stop_file
        self._collective_timeout = timedelta(seconds=config.heartbeat_timeout)  # inside a step after warm-up
        self._sampler = sampler
        self._profiler = StepProfiler(
            config.profile.steps,
            plan.num_steps,
            config.log_dir,
            engine.dp_group.world.rank,
            engine.device,
        )
        self.last_evaluation: dict[str, float] = {}
        self._last_eval_step = -1
        self._num_steps_made = self._num_evaluations = 0  # by this process
        self.clock = ThroughputMeter()
        self.trace: deque[TraceSpan] = deque(maxlen=NUM_SPANS)
        self.stopped_at: int | None = None
        self.skipped: SkippedStep | None = None
        self._stops = False

    @property
    def step(self) -> int:
        """Completed steps."""
        return self.state.step

    def run(self, until: int) -> Iterator[Record]:
        """Train up to a step of the plan, or until a stop is requested; yield records when they are due.

        Returns, not raises, after a skipped step that ends the run: an error from every rank could arrive before the
        record of the step.
        """
        self.stopped_at = None
        try:
            yield from self._run(until)
        finally:
            self._ahead.wait()
            # between two calls, and while they save, ranks wait for each other as long as it takes
            end_activity()
            limit_collectives(PEER_TIMEOUT)

    def _run(self, until: int) -> Iterator[Record]:
        while self.state.step < until:
            if self._num_steps_made >= NUM_WARM_UP_OPERATIONS:
                limit_collectives(self._collective_timeout)
            try:
                with self._profiler.step(self.state.step + 1):
                    self.training_step()
            except StepDiscarded:
                step = self.state.step
                logger.warning("step %d takes long and is discarded; the run stops after step %d", step + 1, step)
                self.stopped_at = step
                return
            if self.skipped is not None:
                yield self.state.step, self.skipped
                if self.skipped.ends_run:
                    return
            if self.state.step % self.config.logging_steps == 0 or self.state.step == self.plan.num_steps:
                yield self.state.step, self._pop_metrics()
            if self._stops:
                self.stopped_at = self.state.step
                return

    def training_step(self) -> Metrics:
        """Make the next optimizer step of the plan; `skipped` is set if it was skipped.

        After StepDiscarded everything that a checkpoint contains is as before the step.
        """
        self._background.check()
        pace = pace_after(self._num_steps_made)
        # only one process alone discards a step
        rng = capture_rng() if self.engine.dp_group.world.size == 1 else None
        set_activity(f"step {self.state.step + 1}: waiting for the reference", pace)
        with self.clock.waiting():  # for the reference; tokens are read by now
            pair_ids, micro_batches = self._ahead.take(self.state.step)
            if (reference := self._reference.train) is not self._cached and reference is not None:
                micro_batches = [replace(each, reference=reference.logps(each.pairs)) for each in micro_batches]
        if self.state.step + 1 < self.plan.num_steps:
            self._ahead.start(self.state.step + 1)
        set_activity(f"step {self.state.step + 1}: training", pace)
        started = time.time()
        try:
            outcome = self.engine.train_step(
                micro_batches,
                self.objective,
                num_pairs_in_step=len(pair_ids),
                learning_rate=self._schedule(self.state.step),
                stop_requested=self._sees_stop_file,
            )
        except StepDiscarded:
            if rng is not None:
                restore_rng(rng)
            raise
        self._stops = outcome.stop_requested
        self._num_steps_made += 1
        self.state.record_step(len(pair_ids), outcome)
        if outcome.nonfinite is None:
            self.skipped = None
            self.objective = self.objective.after_step(outcome.metrics)
        else:
            limit = self.config.max_consecutive_skipped_steps
            self._ahead.wait()  # it reads the same store
            self.skipped = describe_skipped(outcome.nonfinite, self.state, self._train, pair_ids, limit)
        if self._synced is not None:
            self._background.copies.hold_changes()  # a skipped step has not
            self._synced.after_step(self.state.step)
        self.clock.record_step(len(pair_ids), outcome.tokens.useful)
        self.trace.append(TraceSpan("train", self.state.step - 1, started, time.time()))
        return outcome.metrics

    def evaluate(self) -> dict[str, float]:
        """Evaluate without keeping the result."""
        return dict(deque(self._evaluate(), maxlen=1).pop())  # type: ignore[arg-type]  # the last record is metrics

    def evaluate_and_record(self) -> Iterator[EvaluationRecord]:
        """Evaluate and keep the metrics, which rank a checkpoint of this step; empty without a validation set."""
        set_activity(f"evaluating after step {self.state.step}", pace_after(self._num_evaluations))
        with self.clock.paused():
            for record in self._evaluate():
                if isinstance(record, dict):
                    self.last_evaluation, self._last_eval_step = record, self.state.step
                    if self._sampler is not None:
                        set_activity(f"sampling answers after step {self.state.step}")
                        if (answers := self._sampler.sample()) is not None:
                            yield answers
                yield record
        self._num_evaluations += 1
        end_activity()

    def _evaluate(self) -> Iterator[EvaluationRecord]:
        """Evaluate the full validation set, last partial batch included; the RNG of training is not touched."""
        if self._validation is None:
            yield {}
            return
        self._ahead.wait()  # it may read the same files
        dp_group, validation = self.engine.dp_group, self._validation
        sets = evaluation_batches(validation, self._eval_batching, dp_group.rank, dp_group.size)
        sets = {name: _with_empty(own, dp_group.max_over_ranks(len(own))) for name, own in sets.items()}
        score = partial(self.engine.score, statistics=self.objective.statistics)
        sampler = ExampleSampler(self.objective, validation)
        due = time.monotonic() + _SECONDS_BETWEEN_PROGRESS
        done, metrics = 0, dict[str, Metrics]()
        with torch.random.fork_rng():
            torch.manual_seed(self.config.seed)
            for name, batches in sets.items():
                subsets = validation.parts[name].subsets
                evaluation = Evaluation(score, replace(self.objective, groups=tuple(subsets)), dp_group)
                groups = validation.subset_of if subsets else None
                for micro in self._read(validation, self._reference.validation, batches, groups):
                    if time.monotonic() >= due:
                        due = time.monotonic() + _SECONDS_BETWEEN_PROGRESS
                        yield EvaluationProgress(done, sum(map(len, sets.values())))
                    sampler.add(micro.pairs.pair_ids, evaluation.add(micro))
                    done += 1
                metrics[name] = evaluation.metrics()
        if (pairs := sampler.gather(dp_group)) is not None:
            yield pairs
        common = empty_metrics(replace(self.objective, groups=())).keys()
        yield {f"eval/{name}": mean for name, mean in mean_values(of_sets(metrics, common)).items()}

    def save(self) -> Path:
        """Save a checkpoint of this step and return its path; collective.

        With async_save it is only copied here, and published by the time `wait_for_saves` returns.
        """
        set_activity(f"saving step {self.state.step}")
        with self.clock.paused():
            self._background.wait()
            step = self.state.step
            evaluation = self.last_evaluation if self._last_eval_step == step else {}
            # after the last step there is no training to overlap with
            if self.config.async_save and step < self.plan.num_steps:
                self._background.submit(step, self._capture(self._background.copies), evaluation)
            else:
                self._checkpoints.save(step, self._capture(None), evaluation, self.engine.dp_group.world)
            return self._checkpoints.path_for(step)

    def wait_for_saves(self) -> None:
        self._background.wait()

    def resume(self, checkpoint: Path) -> list[str]:
        """Restore a checkpoint bitwise; return notes on what could not be restored."""
        values = load_json(checkpoint / "trainer.json")
        identity = {QUANTIZATION: "none", MIXTURE: "none", **values["identity"]}  # up to 0.3 without them
        # checkpoints up to 0.2 have no settings of the models, and their frozen weights only as the reference
        absent = self._identity.keys() - identity.keys()
        unknown = {POLICY_SETTINGS, REFERENCE_SETTINGS} & absent
        for name, current in self._identity.items():
            if name not in unknown | ({POLICY_WEIGHTS} & absent) and (saved := identity.get(name)) != current:
                raise CheckpointError(
                    f"{checkpoint} belongs to another run: its {name} is {saved}, this run's is {current}; resume with "
                    "the same data, batch size, seed, models and config.json of models, or set a different output_dir"
                )
        self.engine.load(checkpoint)
        self.state = TrainerState.from_json(values["state"])
        self.objective = self.objective.with_state(values["objective"])
        self.last_evaluation = values["last_eval"]
        if self._synced is not None:
            self._synced.load(checkpoint)
        world = self.engine.dp_group.world
        notes = restore_rng_of_rank(load_state(checkpoint, "rng"), world.rank, world.size)
        if unknown:
            notes.append(
                f"{checkpoint} does not record the {' and the '.join(sorted(unknown))}; changes of it are not detected"
            )
        return notes

    def first_micro_batch(self) -> MicroBatch | None:
        """The first micro-batch of the next step, for start-up checks; None if this rank has no pairs in it."""
        return next(self._micro_batches(self.plan.pair_ids(self.state.step), self._reference.train), None)

    def _read_step(self, step: int) -> tuple[PairIds, list[MicroBatch]]:
        """Read what is on disk of a step: all its pair ids, and the micro-batches of this rank."""
        pair_ids = self.plan.pair_ids(step)
        return pair_ids, list(self._micro_batches(pair_ids, self._cached))

    def _micro_batches(self, pair_ids: PairIds, reference: ReferenceScorer | None) -> Iterator[MicroBatch]:
        group, batching = self.engine.dp_group, self._micro_batching
        split = batching.split_in_lockstep if group.needs_lockstep else batching.split
        groups = self._train.part_of if self.objective.groups else None
        return self._read(self._train, reference, split(pair_ids, group.rank, group.size), groups)

    def _read(
        self,
        store: Examples,
        reference: ReferenceScorer | None,
        batches: Sequence[PairIds],
        groups: Callable[[PairIds], PairIds] | None,
    ) -> Iterator[MicroBatch]:
        for ids in batches:
            pairs = store.read(ids)
            logps = None if reference is None else reference.logps(pairs)
            yield MicroBatch(pairs, logps, None if groups is None else groups(ids))

    def _sees_stop_file(self) -> bool:
        """Rank 0 checks the stop file for all ranks: others may see the file at a different step."""
        return self.engine.dp_group.world.rank == 0 and self._stop_file.exists()

    def _pop_metrics(self) -> dict[str, float]:
        return (
            self.state.pop_means()
            | {
                "lr": self._schedule(self.state.step - 1),
                "grad_norm": self.state.grad_norm,
                "epoch": self.plan.epoch_of(self.state.step),
                "skipped_steps": self.state.skipped_steps,
                **({} if self.engine.loss_scale is None else {"loss_scale": self.engine.loss_scale}),
                "pairs_seen": self.state.pairs_seen,
                "tokens/seen": self.state.useful_tokens_seen,
            }
            | self.clock.pop_rates(self._reference.train.seconds_per_pair if self._reference.train else None)
            | memory_metrics()
        )

    def _capture(self, copies: HostBuffers | None) -> Write:
        """Capture the contents of a checkpoint at this step; rank 0 writes what is not sharded."""
        write_policy = self.engine.snapshot({} if self._synced is None else self._synced.tensors(), copies)
        rng_states = self.engine.dp_group.world.gather_object(capture_rng())
        progress = {
            "state": self.state.to_json(),
            "objective": self.objective.state(),
            "identity": dict(self._identity),
            "last_eval": self.last_evaluation,
            "max_tokens_per_micro_batch": self._micro_batching.max_tokens,
        }

        def write(directory: Path) -> list[str]:
            names = list(write_policy(directory))
            if rng_states is None:
                return names
            names += save_state(directory, "rng", merge_rng(rng_states))
            save_json(directory / "trainer.json", progress)
            save_json(directory / "config.json", redact(self.config.model_dump(mode="json")))
            return [*names, "trainer.json", "config.json"]

        return write


def evaluation_batches(
    validation: Examples, batching: ScoringBatching, rank: int, num_ranks: int
) -> dict[str, list[PairIds]]:
    """Pair ids of each validation batch of a rank, by set; over all ranks, each pair is in exactly one."""
    batches, start, lengths = dict[str, list[PairIds]](), 0, validation.lengths
    for name, store in validation.parts.items():
        ids = np.arange(start + rank, start + len(store), num_ranks, dtype=np.int64)
        edges = batching.blocks(lengths[ids]).edges
        batches[name] = [ids[first:last] for first, last in itertools.pairwise(edges.tolist())]
        start += len(store)
    return batches


def _with_empty(batches: Sequence[PairIds], count: int) -> list[PairIds]:
    """Append empty batches up to a number: ranks in lockstep run as many forwards as the one that has most."""
    return [*batches, *[np.zeros(0, dtype=np.int64)] * (count - len(batches))]
