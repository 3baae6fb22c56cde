"""What training leaves behind besides weights: counters, metrics not logged yet, skipped steps, values of single pairs.

`skipped_steps.jsonl` has one JSON object per skipped step, with the reason and the pairs to check. `eval_pairs.jsonl`
has one per evaluation, with rewards, logps and lengths: a mean does not show whether a few pairs or all of them moved.
Large validation sets are sampled at regular intervals, the same pairs at each evaluation, so a record stays small.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thresher.data.batching.plan import PairIds
from thresher.data.store.arrow_schema import hash_pair
from thresher.data.store.reader import PairStore
from thresher.distributed.groups import DataParallelGroup
from thresher.losses.metrics import MetricSum, merge_metrics
from thresher.losses.objective import Objective
from thresher.losses.pairs import ObjectiveInputs
from thresher.observability.log_files import EVAL_PAIRS, SKIPPED_STEPS
from thresher.observability.trackers.jsonl import StepLog, encode_number
from thresher.strategies.engine import StepOutcome
from thresher.strategies.nonfinite import NonFiniteStep


@dataclass
class TrainerState:
    """Counters of a run, saved in checkpoints; the field names are the keys of `trainer.json`.

    step: completed optimizer steps, including skipped ones. skipped_in_a_row: without overflows of fp16. window: metric
    sums since the last logged step.
    """

    step: int = 0
    pairs_seen: int = 0
    useful_tokens_seen: int = 0
    skipped_steps: int = 0
    skipped_in_a_row: int = 0
    grad_norm: float = 0.0
    window: dict[str, MetricSum] = field(default_factory=dict)

    def record_step(self, num_pairs: int, outcome: StepOutcome) -> None:
        """Count a step; a skipped one adds no pairs, tokens or metrics."""
        self.step += 1
        self.grad_norm = outcome.grad_norm
        if outcome.skipped:
            self.skipped_steps += 1
            self.skipped_in_a_row += outcome.failed
            return
        self.skipped_in_a_row = 0
        self.pairs_seen += num_pairs
        self.useful_tokens_seen += outcome.tokens.useful
        tokens = {f"tokens/{kind}": MetricSum(number, 1) for kind, number in vars(outcome.tokens).items()}
        self._add_to_window(outcome.metrics | tokens)

    def _add_to_window(self, metrics: Mapping[str, MetricSum]) -> None:
        floats = {name: MetricSum(float(m.sum), float(m.count)) for name, m in metrics.items()}
        self.window = merge_metrics([self.window, floats])

    def pop_means(self) -> dict[str, float]:
        """Return the means since the last call, without those of no pair, and start a new window."""
        means = {name: metric.mean for name, metric in self.window.items() if metric.count}
        self.window = {}
        return means

    def to_json(self) -> dict[str, Any]:
        values = {name: value for name, value in vars(self).items() if name != "window"}
        return values | {"window": {name: [m.sum, m.count] for name, m in self.window.items()}}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> TrainerState:
        window = {name: MetricSum(total, count) for name, (total, count) in values["window"].items()}
        return cls(**{**values, "window": window})


@dataclass(frozen=True)
class TrainingProgress:
    """Completed steps and the latest evaluation of a run."""

    step: int
    last_evaluation: Mapping[str, float]


@dataclass(frozen=True)
class NonFinitePair:
    """A pair by its number in the store and its content hash; source is its first non-finite value, if known."""

    number: int
    content_hash: str
    source: str | None


@dataclass(frozen=True)
class SkippedStep:
    """Why a step was skipped, and the pairs responsible: all pairs of the step if no single one is.

    An overflow of fp16 has no pairs and is no failure. consecutive: failed steps up to and including this one.
    ends_run: there are too many of them. loss_scale: of the next step, in fp16.
    """

    reason: str
    grad_norm: float
    pairs: tuple[NonFinitePair, ...]
    consecutive: int
    ends_run: bool
    loss_scale: float | None = None


def describe_skipped(
    nonfinite: NonFiniteStep, state: TrainerState, store: PairStore, pair_ids: PairIds, max_consecutive: int
) -> SkippedStep:
    """Describe a step that state has already recorded; pair_ids are all pairs of the step."""
    consecutive, scale = state.skipped_in_a_row, nonfinite.loss_scale
    if not nonfinite.is_failure:
        return SkippedStep(nonfinite.reason, state.grad_norm, (), consecutive, ends_run=False, loss_scale=scale)
    read = store.read(np.array(sorted(nonfinite.pairs), dtype=np.int64) if nonfinite.pairs else pair_ids)
    pairs = tuple(
        NonFinitePair(store.number_in_files(number), hash_pair(pair).pair.hex(), nonfinite.pairs.get(number))
        for number, pair in zip(read.pair_ids.tolist(), read.pairs, strict=True)
    )
    ends_run = consecutive >= max_consecutive
    return SkippedStep(nonfinite.reason, state.grad_norm, pairs, consecutive, ends_run, scale)


class SkippedStepLog:
    """Writes skipped steps to `skipped_steps.jsonl` in the log directory of the run."""

    def __init__(self, run_dir: Path, resume_step: int | None) -> None:
        self._log = StepLog(run_dir / SKIPPED_STEPS, resume_step)

    @property
    def path(self) -> Path:
        return self._log.path

    def write(self, step: int, skipped: SkippedStep) -> None:
        """Append one line."""
        record = {
            "step": step,
            "reason": skipped.reason,
            "grad_norm": skipped.grad_norm if math.isfinite(skipped.grad_norm) else repr(skipped.grad_norm),
            "in_a_row": skipped.consecutive,
            **({} if skipped.loss_scale is None else {"loss_scale": skipped.loss_scale}),
            "pairs": [
                {"pair": pair.number, "hash": pair.content_hash, "fault": pair.source or "not known"}
                for pair in skipped.pairs
            ],
        }
        self._log.write(record)


MAX_PAIRS = 512
_DIGITS = 7  # of an fp32 number


@dataclass(frozen=True)
class EvaluatedPairs:
    """Pairs by their number in the store, and their values by name: one list per value, in the order of `numbers`."""

    numbers: list[int]
    values: Mapping[str, list[float]]


class PairSampler:
    """Collects the values of every n-th pair on each rank, at most MAX_PAIRS over all ranks."""

    def __init__(self, objective: Objective, store: PairStore, max_pairs: int = MAX_PAIRS):
        self._objective = objective
        self._store = store
        self._interval = -(-len(store) // max_pairs)
        self._parts: list[tuple[PairIds, dict[str, Tensor]]] = []

    def add(self, pair_ids: PairIds, inputs: ObjectiveInputs) -> None:
        """Keep the sampled pairs of a micro-batch."""
        kept = np.flatnonzero(pair_ids % self._interval == 0)
        if len(kept):
            index = torch.from_numpy(kept)
            columns = _columns(self._objective, inputs)
            self._parts.append((pair_ids[kept], {name: each.cpu()[index] for name, each in columns.items()}))

    def gather(self, dp_group: DataParallelGroup) -> EvaluatedPairs | None:
        """Return the pairs of all ranks on rank 0, in the order of the store; None on the other ranks."""
        by_rank = dp_group.gather_object(self._parts)
        if by_rank is None:
            return None
        parts = [part for parts in by_rank for part in parts]
        if not parts:
            return None
        ids = np.concatenate([ids for ids, _ in parts])
        order = np.argsort(ids)
        values = {name: torch.cat([columns[name] for _, columns in parts])[order].tolist() for name in parts[0][1]}
        return EvaluatedPairs([self._store.number_in_files(number) for number in ids[order].tolist()], values)


def _columns(objective: Objective, inputs: ObjectiveInputs) -> dict[str, Tensor]:
    rewards, policy, reference = objective.rewards(inputs), inputs.policy, inputs.reference
    return {
        "rewards/chosen": rewards.chosen,
        "rewards/rejected": rewards.rejected,
        "logps/chosen": policy.chosen.sums(),
        "logps/rejected": policy.rejected.sums(),
        "lengths/chosen": policy.chosen.lengths,
        "lengths/rejected": policy.rejected.lengths,
        **(
            {}
            if reference is None
            else {
                "reference_logps/chosen": reference.chosen.sums(),
                "reference_logps/rejected": reference.rejected.sums(),
            }
        ),
    }


class EvaluatedPairsLog:
    """Writes the pairs of evaluations to `eval_pairs.jsonl` in the log directory of the run."""

    def __init__(self, run_dir: Path, resume_step: int | None) -> None:
        self._log = StepLog(run_dir / EVAL_PAIRS, resume_step)

    def write(self, step: int, pairs: EvaluatedPairs) -> None:
        """Append one line."""
        values = {name: [encode_number(_rounded(value)) for value in column] for name, column in pairs.values.items()}
        self._log.write({"step": step, "pairs": pairs.numbers, **values})


def _rounded(value: float) -> float:
    return value if isinstance(value, int) else float(f"{value:.{_DIGITS}g}")
