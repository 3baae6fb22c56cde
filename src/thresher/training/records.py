"""What training leaves behind besides weights: counters, metrics not logged yet, skipped steps, values of single pairs.

`skipped_steps.jsonl` has one JSON object per skipped step, with the reason and the pairs to check. `eval_pairs.jsonl`
has one per evaluation, with rewards, logps and lengths: a mean does not show whether a few pairs or all of them moved.
Large validation sets are sampled at regular intervals, the same pairs at each evaluation, so a record stays small.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thresher.data.batching.mismatched import Examples, MismatchedAnswers
from thresher.data.batching.plan import PairIds
from thresher.data.store.arrow_schema import hash_example
from thresher.distributed.groups import DataParallelGroup
from thresher.engines.engine import StepOutcome
from thresher.engines.nonfinite import NonFiniteStep
from thresher.losses.comparisons import compare
from thresher.losses.metrics import MetricSum, mean_values, merge_metrics
from thresher.losses.objective import Objective
from thresher.losses.pairs import ObjectiveInputs
from thresher.losses.responses import ResponseScores
from thresher.observability.trackers.jsonl import encode_number


@dataclass
class TrainerState:
    """Counters of a run, saved in checkpoints; the field names are the keys of `trainer.json`."""

    step: int = 0  # completed optimizer steps, including skipped ones
    pairs_seen: int = 0
    useful_tokens_seen: int = 0
    skipped_steps: int = 0
    skipped_in_a_row: int = 0  # without overflows of fp16
    grad_norm: float = 0.0
    window: dict[str, MetricSum] = field(default_factory=dict)  # metric sums since the last logged step

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
        floats = {name: MetricSum(float(m.sum), float(m.count)) for name, m in (outcome.metrics | tokens).items()}
        self.window = merge_metrics([self.window, floats])

    def pop_means(self) -> dict[str, float]:
        """Return the means since the last call, except of metrics without an example, and start a new window."""
        means = mean_values(self.window)
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
class NonFiniteExample:
    """A pair by its number in its store and its content hash; fault is its first non-finite value, if known."""

    number: int
    content_hash: str
    fault: str | None
    source: str = ""  # of a mixture


@dataclass(frozen=True)
class SkippedStep:
    """Why a step was skipped, and the pairs responsible. An overflow of fp16 is not a failure."""

    reason: str
    grad_norm: float
    pairs: tuple[NonFiniteExample, ...]  # all of the step if no single one is responsible, none for an overflow
    consecutive: int  # failed steps up to and including this one
    ends_run: bool  # there are too many of them
    loss_scale: float | None = None  # of the next step, in fp16

    def to_json(self, step: int) -> dict[str, Any]:
        return {
            "step": step,
            "reason": self.reason,
            "grad_norm": self.grad_norm if math.isfinite(self.grad_norm) else repr(self.grad_norm),
            "in_a_row": self.consecutive,
            **({} if self.loss_scale is None else {"loss_scale": self.loss_scale}),
            "pairs": [
                {"pair": pair.number, "hash": pair.content_hash, "fault": pair.fault or "not known"}
                | ({"source": pair.source} if pair.source else {})
                for pair in self.pairs
            ],
        }


def describe_skipped(
    nonfinite: NonFiniteStep, state: TrainerState, store: Examples, pair_ids: PairIds, max_consecutive: int
) -> SkippedStep:
    """Describe a step that state has already recorded; pair_ids are all pairs of the step."""
    consecutive = state.skipped_in_a_row
    pairs: tuple[NonFiniteExample, ...] = ()
    if nonfinite.is_failure:
        read = store.read(np.array(sorted(nonfinite.pairs), dtype=np.int64) if nonfinite.pairs else pair_ids)
        if isinstance(store, MismatchedAnswers):
            read = read.only_side(0)  # the hash of the example in the store
        names, parts = list(store.parts), store.part_of(read.pair_ids).tolist()
        pairs = tuple(
            NonFiniteExample(
                store.number_in_files(number), hash_example(pair).pair.hex(), nonfinite.pairs.get(number), names[part]
            )
            for number, pair, part in zip(read.pair_ids.tolist(), read.pairs, parts, strict=True)
        )
    ends_run = nonfinite.is_failure and consecutive >= max_consecutive
    return SkippedStep(nonfinite.reason, state.grad_norm, pairs, consecutive, ends_run, nonfinite.loss_scale)


MAX_PAIRS = 512
_DIGITS = 7  # of an fp32 number


@dataclass(frozen=True)
class EvaluatedExamples:
    """Pairs by their number in their store, and their values by name: one list per value, in the order of `numbers`."""

    numbers: list[int]
    values: Mapping[str, list[float]]
    sets: list[str] = field(default_factory=list)  # of each pair, if there are several

    def to_json(self, step: int) -> dict[str, Any]:
        values = {name: [encode_number(_rounded(value)) for value in column] for name, column in self.values.items()}
        return {"step": step, "pairs": self.numbers, **({"sets": self.sets} if self.sets else {}), **values}


class ExampleSampler:
    """Collects the values of every n-th pair on each rank, at most MAX_PAIRS over all ranks."""

    def __init__(self, objective: Objective, store: Examples, max_pairs: int = MAX_PAIRS):
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
            if self._objective.trains_rewards:
                columns |= self._response_lengths(pair_ids)
            self._parts.append((pair_ids[kept], {name: each.cpu()[index] for name, each in columns.items()}))

    def _response_lengths(self, pair_ids: PairIds) -> dict[str, Tensor]:
        """Lengths of the first and the last response, of which a reward model scores one position each."""
        lengths = torch.from_numpy(self._store.lengths[pair_ids, 1:].astype(np.int64))
        last = (lengths > 0).sum(1, keepdim=True) - 1
        return {"lengths/chosen": lengths[:, 0], "lengths/rejected": lengths.gather(1, last)[:, 0]}

    def gather(self, dp_group: DataParallelGroup) -> EvaluatedExamples | None:
        """Return the pairs of all ranks on rank 0, in the order of the store; None on the other ranks."""
        parts = [part for parts in dp_group.gather_object(self._parts) or () for part in parts]
        if not parts:
            return None
        ids = np.concatenate([ids for ids, _ in parts])
        order = np.argsort(ids)
        names = dict.fromkeys(name for _, columns in parts for name in columns)
        # micro-batches whose lists are short lack the last ranks
        absent = torch.tensor(torch.nan, dtype=torch.float64)
        values = {
            name: torch.cat([columns.get(name, absent.expand(len(ids))) for ids, columns in parts])[order].tolist()
            for name in names
        }
        numbers = [self._store.number_in_files(number) for number in ids[order].tolist()]
        sets = list(self._store.parts)
        of_each = [sets[part] for part in self._store.part_of(ids[order]).tolist()] if any(sets) else []
        return EvaluatedExamples(numbers, values, of_each)


def _columns(objective: Objective, inputs: ObjectiveInputs) -> dict[str, Tensor]:
    """Values of each example: of a pair, of the best and the worst response of a list, or of a response with a label.

    Lists also have the reward of each response by its rank, NaN where there are fewer.
    """
    if objective.reads == "labels":
        responses = ResponseScores.of(inputs)
        of_reference = responses.reference_logps
        columns = {
            "label": responses.values[:, 0],
            "rewards/response": objective.label_rewards(responses),
            "logps/response": responses.logps[:, 0],
            "lengths/response": responses.lengths[:, 0],
        }
        return columns if of_reference is None else columns | {"reference_logps/response": of_reference[:, 0]}
    compared = compare(inputs, "best_worst")
    rewards, policy, reference = objective.rewards(compared.inputs), compared.inputs.policy, compared.inputs.reference
    columns = {"rewards/chosen": rewards.chosen, "rewards/rejected": rewards.rejected}
    if not objective.trains_rewards:  # a reward model has no logps, and scores one position of each response
        columns |= {
            "logps/chosen": policy.chosen.sums(),
            "logps/rejected": policy.rejected.sums(),
            "lengths/chosen": policy.chosen.lengths,
            "lengths/rejected": policy.rejected.lengths,
        }
    if reference is not None:
        columns["reference_logps/chosen"] = reference.chosen.sums()
        columns["reference_logps/rejected"] = reference.rejected.sums()
    columns = {name: compared.per_example(each, inputs.num_pairs) for name, each in columns.items()}
    return columns if inputs.values is None else columns | _rewards_by_rank(objective, inputs)


def _rewards_by_rank(objective: Objective, inputs: ObjectiveInputs) -> dict[str, Tensor]:
    rewards = objective.rewards(compare(inputs, "best_rest").inputs)
    worse = rewards.rejected.view(-1, inputs.num_pairs)
    is_present = [side.lengths > 0 for side in inputs.policy.sides[1:]]
    by_rank = [rewards.chosen[: inputs.num_pairs], *map(torch.where, is_present, worse, [torch.nan] * len(worse))]
    return {f"rewards/rank_{rank}": each for rank, each in enumerate(by_rank, start=1)}


def _rounded(value: float) -> float:
    return value if isinstance(value, int) else float(f"{value:.{_DIGITS}g}")
