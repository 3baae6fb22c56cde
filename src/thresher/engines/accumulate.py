"""Turn the micro-batches of a step into a gradient: score, apply the objective, divide, backward.

The gradient of a step is d(sum of per-pair losses / num_pairs_in_step). `_step_loss` divides, by the pairs of the step
over all data-parallel ranks, and multiplies by the loss scale of fp16. Every later reduction over micro-batches and
ranks is therefore a plain sum: autograd adds up micro-batches, and native/parameters.py lists what is summed over which
ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from thresher.data.example import ExampleBatch
from thresher.distributed.groups import DataParallelGroup, Metrics
from thresher.distributed.tensors import copy_to_device
from thresher.engines.nonfinite import ScoredPairs
from thresher.losses.metrics import merge_metrics
from thresher.losses.objective import Objective
from thresher.losses.pairs import (
    NO_STATISTICS,
    ExampleLogps,
    ObjectiveInputs,
    ResponseLogps,
    TokenStatistics,
    concat_pairs,
    empty_logps,
)
from thresher.observability.heartbeat import report_progress

StopRequested = Callable[[], bool]
Score = Callable[[ExampleBatch], ExampleLogps]
LossFn = Callable[[int, ExampleLogps], Tensor]

# A stop request ends a step between two micro-batches if the step has lasted this long; a faster one is finished.
SECONDS_BEFORE_DISCARD = 5.0


def never() -> bool:
    return False


class StepDiscarded(Exception):  # noqa: N818  # control flow, not an error
    """A stop was requested during a slow step, which has changed neither weights nor optimizer state."""


@dataclass(frozen=True)
class MicroBatch:
    """Pairs with their reference logps; reference is None for losses without one."""

    pairs: ExampleBatch
    reference: ExampleLogps | None
    groups: npt.NDArray[np.int64] | None = None  # of each pair, for metrics

    @property
    def mismatched(self) -> ExampleBatch:
        """The prompts with their mismatched answer alone, where they have one."""
        return self.pairs.only_side(1)

    @property
    def matched(self) -> MicroBatch:
        """The examples without their mismatched answers."""
        if not len(self.pairs):  # the policy, too, computes two empty sides
            return self
        reference = None if self.reference is None else ExampleLogps(self.reference.sides[:1])
        return MicroBatch(self.pairs.only_side(0), reference, self.groups)


@dataclass(frozen=True)
class TokenCounts:
    """Tokens of a step."""

    # both full sequences of every pair, for any layout
    useful: int = 0
    # computed without use
    padding: int = 0
    # not computed, because both sides share the prompt or no scored token depends on it
    shared: int = 0

    def __add__(self, other: TokenCounts) -> TokenCounts:
        return TokenCounts(self.useful + other.useful, self.padding + other.padding, self.shared + other.shared)


class MicroBatchExecutor(Protocol):
    """Runs a step's micro-batches through the model, sequentially or with a pipeline schedule."""

    def score(self, batch: ExampleBatch, *, statistics: TokenStatistics = NO_STATISTICS) -> ExampleLogps:
        """Score without gradient; every process of a data-parallel rank returns the logps."""

    def backward(
        self,
        batches: Sequence[ExampleBatch],
        loss_fn: LossFn,
        *,
        statistics: TokenStatistics,
        loss_scale: float | None = None,
    ) -> tuple[TokenCounts, Metrics]:
        """Score each batch and run the backward of loss_fn(index of the batch, its logps), in any order.

        Return the tokens, and the metrics of loss terms that do not depend on logps.

        An executor may add a term of the model itself to the loss, such as the balance of its experts, times
        loss_scale, which loss_fn contains already. In a pipeline only the last stage has logps, so only its processes
        call loss_fn and count tokens.
        """

    def check_logps(self, batch: ExampleBatch) -> None:
        """Compare the logps with the model's original forward; raise LayoutError or UserError if they differ."""


def accumulate_gradients(
    executor: MicroBatchExecutor,
    micro_batches: Sequence[MicroBatch],
    objective: Objective,
    num_pairs_in_step: int,
    dp_group: DataParallelGroup,
    device: torch.device,
    loss_scale: float | None = None,
    stop_requested: StopRequested = never,
) -> tuple[Metrics, TokenCounts, list[ScoredPairs]]:
    """Add this rank's term of the step's gradient, times loss_scale, to `.grad` of the parameters.

    Return this process's metrics and tokens, and what non-finite pairs are located in.

    A rank without pairs in the step has no micro-batches, or empty ones if the ranks run in lockstep (FSDP).
    Raises StepDiscarded if a stop is requested while a slow step runs; the gradients are then incomplete.
    """
    mismatched: list[ScoredPairs] = []
    if objective.reads_mismatched:
        point, mismatched = _reference_point(executor, micro_batches, dp_group, device, stop_requested)
        objective = replace(objective, reference_point=point)
        micro_batches = [micro.matched for micro in micro_batches]
    if objective.couples_pairs:
        return _accumulate_coupled(
            executor, micro_batches, objective, num_pairs_in_step, dp_group, loss_scale, stop_requested
        )
    finished = _MicroBatchClock(dp_group, stop_requested)
    metrics: list[Metrics] = []
    scored_pairs: list[ScoredPairs] = []

    def loss_fn(index: int, policy: ExampleLogps) -> Tensor:
        inputs = objective_inputs(micro_batches[index], policy)
        output = objective(inputs)
        metrics.append(output.metrics)
        pair_ids, per_pair = micro_batches[index].pairs.pair_ids, output.per_pair.detach()
        scored_pairs.append(ScoredPairs(pair_ids, policy.detach(), inputs.reference, per_pair))
        finished.scored(is_last=index == len(micro_batches) - 1)
        return _step_loss(output.per_pair, num_pairs_in_step, loss_scale)

    batches = [micro.pairs for micro in micro_batches]
    tokens, of_model = executor.backward(batches, loss_fn, statistics=objective.statistics, loss_scale=loss_scale)
    local = merge_metrics(metrics) or empty_metrics(objective)
    # last: a mismatched answer that is not finite is named, not the loss of its example
    return local | of_model, tokens, [*scored_pairs, *mismatched]


def _reference_point(
    executor: MicroBatchExecutor,
    micro_batches: Sequence[MicroBatch],
    dp_group: DataParallelGroup,
    device: torch.device,
    stop_requested: StopRequested,
) -> tuple[float, list[ScoredPairs]]:
    """KTO's z0: the mean log ratio of the step's mismatched answers over all ranks, at least 0; and their logps."""
    finished = _MicroBatchClock(dp_group, stop_requested)
    scored_pairs: list[ScoredPairs] = []
    log_ratios: list[Tensor] = []
    counts: list[Tensor] = []
    # forked: the backward draws the same dropout masks as without this forward
    with torch.no_grad(), torch.random.fork_rng():
        for micro in micro_batches:
            mismatched = micro.mismatched
            policy = executor.score(mismatched).chosen
            assert micro.reference is not None  # noqa: S101  # the loss has one
            # indices from the host: a mask on the device would make the host wait for it
            index = torch.tensor([at for at, each in enumerate(micro.pairs.pairs) if len(each.responses) > 1])
            index = copy_to_device(index.long(), policy.values.device)
            reference = micro.reference.side(1).sums().index_select(0, index)
            of_each = policy.sums() - reference
            log_ratios.append(of_each.sum())
            one_sum = ExampleLogps.of(ResponseLogps(reference, torch.ones_like(index)))
            scored = ScoredPairs(mismatched.pair_ids, ExampleLogps.of(policy), one_sum, of_each, are_mismatched=True)
            scored_pairs.append(scored)
            # an answer that was cut before its first scored token does not count
            counts.append((policy.lengths > 0).sum())
            finished.scored()
    total, count = dp_group.sum_numbers([sum(log_ratios), sum(counts)], device)
    point = total / count if count else 0.0
    return 0.0 if point < 0.0 else point, scored_pairs  # a NaN stays one


def _accumulate_coupled(
    executor: MicroBatchExecutor,
    micro_batches: Sequence[MicroBatch],
    objective: Objective,
    num_pairs_in_step: int,
    dp_group: DataParallelGroup,
    loss_scale: float | None,
    stop_requested: StopRequested,
) -> tuple[Metrics, TokenCounts, list[ScoredPairs]]:
    """Gradient of a loss that couples all pairs of a step, by the chain rule in two passes.

    1. Score every pair without gradient, all-gather the logps, and differentiate the loss with respect to them.
    2. Backward each micro-batch with (logps * that derivative).sum() as its loss.

    Costs one more forward than other losses; exact for any micro-batch size and number of ranks.
    """
    finished = _MicroBatchClock(dp_group, stop_requested)
    # forked: the second pass draws the same dropout masks again
    with torch.no_grad(), torch.random.fork_rng():
        local = []
        for micro in micro_batches:
            local.append(objective_inputs(micro, executor.score(micro.pairs, statistics=objective.statistics)))
            finished.scored()
    by_rank = dp_group.all_gather_pairs(concat_pairs(local or [_empty_inputs(objective)]))
    policy = by_rank[dp_group.rank].policy
    leaves = [side.values.detach().requires_grad_() for side in policy.sides]
    sides = zip(policy.sides, leaves, strict=True)
    policy = ExampleLogps(tuple(replace(side, values=values) for side, values in sides))
    own = by_rank[dp_group.rank] = replace(by_rank[dp_group.rank], policy=policy)
    output = objective(concat_pairs(by_rank))
    loss = _step_loss(output.per_pair, num_pairs_in_step, loss_scale)
    gradients = torch.autograd.grad(loss, leaves, materialize_grads=True)
    # by side, and of each side by micro-batch
    parts = [
        gradient.split([inputs.policy.side(number).values.numel() for inputs in local])
        for number, gradient in enumerate(gradients)
    ]

    def loss_fn(index: int, policy: ExampleLogps) -> Tensor:
        finished.scored(is_last=index == len(micro_batches) - 1)
        return torch.cat([side.values * part[index] for side, part in zip(policy.sides, parts, strict=False)]).sum()

    batches = [micro.pairs for micro in micro_batches]
    # the derivative from pass 1 already contains all that the loss needs besides the logps
    tokens, of_model = executor.backward(batches, loss_fn, statistics=NO_STATISTICS, loss_scale=loss_scale)
    start = sum(inputs.num_pairs for inputs in by_rank[: dp_group.rank])
    pair_ids = np.concatenate([np.zeros(0, dtype=np.int64), *[batch.pair_ids for batch in batches]])
    per_pair = output.per_pair.detach()[start : start + own.num_pairs]
    scored = ScoredPairs(pair_ids, own.policy.detach(), own.reference, per_pair)
    # every rank and pipeline stage has the metrics of the whole step, and they are summed over both later
    return dp_group.metrics_group.only_on_rank0(output.metrics) | of_model, tokens, [scored]


class _MicroBatchClock:
    """Reports each scored micro-batch of a step, and discards a slow step if a stop is requested.

    Only in a run of one process: others would wait in their next collective for a rank that has left the step, and to
    agree on it they would need a collective per micro-batch.
    """

    def __init__(self, dp_group: DataParallelGroup, stop_requested: StopRequested) -> None:
        self._stop_requested = stop_requested if dp_group.world.size == 1 else never
        self._may_discard_at = time.monotonic() + SECONDS_BEFORE_DISCARD

    def scored(self, *, is_last: bool = False) -> None:
        """Record a micro-batch; the last one is worth its backward."""
        report_progress()
        if not is_last and time.monotonic() >= self._may_discard_at and self._stop_requested():
            raise StepDiscarded


def _step_loss(per_pair: Tensor, num_pairs_in_step: int, loss_scale: float | None) -> Tensor:
    # sum, not mean: micro-batches and ranks hold different pair counts, so divide once, globally
    loss = per_pair.sum() / num_pairs_in_step
    return loss if loss_scale is None else loss * loss_scale


class Evaluation:
    """Metric sums over the micro-batches of all ranks, without gradient; a coupled loss gets all pairs at once."""

    def __init__(self, score: Score, objective: Objective, dp_group: DataParallelGroup):
        self._score, self._objective, self._dp_group = score, objective, dp_group
        self._inputs: list[ObjectiveInputs] = []
        self._metrics: list[Metrics] = []

    @torch.no_grad()
    def add(self, micro: MicroBatch) -> ObjectiveInputs:
        """Score a micro-batch of this rank; return its logps."""
        inputs = objective_inputs(micro, self._score(micro.pairs))
        report_progress()
        if self._objective.couples_pairs:
            self._inputs.append(inputs)
        else:
            self._metrics.append(self._objective(inputs).metrics)
        return inputs

    @torch.no_grad()
    def metrics(self) -> Metrics:
        """Sum the metrics over all ranks."""
        objective, dp_group = self._objective, self._dp_group
        if objective.couples_pairs:
            local = concat_pairs(self._inputs or [_empty_inputs(objective)])
            metrics = dp_group.only_on_rank0(objective(concat_pairs(dp_group.all_gather_pairs(local))).metrics)
        else:
            metrics = merge_metrics(self._metrics) or empty_metrics(objective)
        return dp_group.all_reduce_metrics(metrics)[0]


def objective_inputs(micro: MicroBatch, policy: ExampleLogps) -> ObjectiveInputs:
    """Policy and reference logps of a micro-batch, with the columns of its examples."""
    values, device = micro.pairs.values, policy.chosen.values.device
    return ObjectiveInputs(
        policy=_with_token_weights(policy, micro.pairs),
        reference=micro.reference,
        weight=_column([pair.weight for pair in micro.pairs.pairs], 1.0, policy),
        margin=_column([pair.margin for pair in micro.pairs.pairs], 0.0, policy),
        values=None if values is None else copy_to_device(torch.from_numpy(values), device),
        group=None if micro.groups is None else copy_to_device(torch.from_numpy(micro.groups), device),
    )


def _with_token_weights(policy: ExampleLogps, batch: ExampleBatch) -> ExampleLogps:
    found = [batch.token_weights(number) for number in range(len(policy.sides))]
    if all(each is None for each in found):
        return policy
    device = policy.chosen.values.device
    weights = (None if each is None else copy_to_device(torch.from_numpy(each), device) for each in found)
    sides = zip(policy.sides, weights, strict=True)
    return ExampleLogps(tuple(replace(side, token_weights=weight) for side, weight in sides))


def _column(values: list[float], neutral: float, policy: ExampleLogps) -> Tensor | None:
    """None if every value is neutral: a loss without support for the column rejects only one that has an effect."""
    if all(value == neutral for value in values):
        return None
    return copy_to_device(torch.tensor(values, dtype=torch.float32), policy.chosen.values.device)


def _empty_inputs(objective: Objective) -> ObjectiveInputs:
    sides = empty_logps(statistics=objective.statistics)
    return ObjectiveInputs(sides, sides if objective.needs_reference else None)


def empty_metrics(objective: Objective) -> Metrics:
    """Every metric of the objective with a count of 0: ranks must agree on the names when they sum metrics."""
    return objective(_empty_inputs(objective)).metrics
