"""Micro-batches to gradients, for every engine: score, objective, one division by the pairs of the whole step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from thresher.data.pair import PairBatch
from thresher.distributed.groups import DataParallelGroup, Metrics
from thresher.losses.metrics import merge_metrics
from thresher.losses.objective import Objective
from thresher.losses.pairs import ChosenRejectedLogps, ObjectiveInputs, ResponseLogps, concat_pairs, empty_logps
from thresher.strategies.nonfinite import ScoredPairs
from thresher.strategies.strategy import MicroBatch, TokenCounts

Score = Callable[[PairBatch], ChosenRejectedLogps]
LossFn = Callable[[int, ChosenRejectedLogps], Tensor]


class MicroBatchExecutor(Protocol):
    """How an engine goes through micro-batches: one after another, or several at once along a pipeline."""

    def score(self, batch: PairBatch, *, with_squared_probs: bool = False) -> ChosenRejectedLogps:
        """Score, for use without gradient; every process of a rank gets the logps."""
        ...

    def backward(self, batches: Sequence[PairBatch], loss_fn: LossFn, *, with_squared_probs: bool) -> TokenCounts:
        """Score each batch and send back the gradient of loss_of(its number, its logps), in any order.

        loss_of is called where the logps are: in a pipeline, by the processes of the last stage alone. They alone count
        tokens, too.
        """
        ...


@dataclass(frozen=True)
class LocalStepResult:
    """A process's part of a step, its gradient aside; seen is what tells spoilt pairs from sound ones, if need be."""

    metrics: Metrics
    tokens: TokenCounts
    seen: Sequence[ScoredPairs]


def accumulate_gradients(
    passes: MicroBatchExecutor,
    micro_batches: Sequence[MicroBatch],
    objective: Objective,
    num_pairs_in_step: int,
    ranks: DataParallelGroup,
) -> LocalStepResult:
    """Add this rank's part of the step's gradient to the parameters; return its part of the rest.

    A rank may hold no pair of a step that has fewer pairs than ranks.
    """
    if objective.couples_pairs:
        return _accumulate_coupled(passes, micro_batches, objective, num_pairs_in_step, ranks)
    metrics: list[Metrics] = []
    seen: list[ScoredPairs] = []

    def loss_fn(number: int, policy: ChosenRejectedLogps) -> Tensor:
        logps = pair_logps(micro_batches[number], policy)
        output = objective(logps)
        metrics.append(output.metrics)
        seen.append(ScoredPairs.of(micro_batches[number].pairs.pair_ids, logps, output.per_pair))
        # sum, not mean: micro-batches and ranks hold different pair counts, so divide once, globally
        return output.per_pair.sum() / num_pairs_in_step

    pairs = [micro.pairs for micro in micro_batches]
    tokens = passes.backward(pairs, loss_fn, with_squared_probs=objective.needs_squared_probs)
    return LocalStepResult(merge_metrics(metrics) or objective(_no_pairs(objective)).metrics, tokens, seen)


def _accumulate_coupled(
    passes: MicroBatchExecutor,
    micro_batches: Sequence[MicroBatch],
    objective: Objective,
    num_pairs_in_step: int,
    ranks: DataParallelGroup,
) -> LocalStepResult:
    """Losses that couple all pairs of a step: score everything first, then send each micro-batch its own gradient.

    One more forward than other losses, and exact for any micro-batch size and number of ranks: the objective sees the
    whole step at once and its gradient with respect to every logp is the chain rule's outer factor.
    """
    # forked: the second pass draws the same dropout masks again
    with torch.no_grad(), torch.random.fork_rng():
        scored = [
            pair_logps(micro, passes.score(micro.pairs, with_squared_probs=objective.needs_squared_probs))
            for micro in micro_batches
        ]
    parts = ranks.all_gather_pairs(concat_pairs(scored or [_no_pairs(objective)]))
    own = parts[ranks.rank] = _with_leaves(parts[ranks.rank])
    output = objective(concat_pairs(parts))
    total = output.per_pair.sum() / num_pairs_in_step
    leaves = [own.policy.chosen.values, own.policy.rejected.values]
    chosen, rejected = torch.autograd.grad(total, leaves, materialize_grads=True)
    of_chosen = chosen.split([pairs.policy.chosen.values.numel() for pairs in scored])
    of_rejected = rejected.split([pairs.policy.rejected.values.numel() for pairs in scored])

    def loss_fn(number: int, policy: ChosenRejectedLogps) -> Tensor:
        weighted = [(policy.chosen.values * of_chosen[number]), (policy.rejected.values * of_rejected[number])]
        return torch.cat(weighted).sum()

    pairs = [micro.pairs for micro in micro_batches]
    tokens = passes.backward(pairs, loss_fn, with_squared_probs=False)
    before = sum(part.num_pairs for part in parts[: ranks.rank])
    ids = np.concatenate([np.zeros(0, dtype=np.int64), *[micro.pair_ids for micro in pairs]])
    seen = ScoredPairs.of(ids, own, output.per_pair[before : before + own.num_pairs])
    return LocalStepResult(ranks.metrics_group.only_on_rank0(output.metrics), tokens, [seen])


def evaluate_objective(
    score: Score, micro_batches: Iterable[MicroBatch], objective: Objective, ranks: DataParallelGroup
) -> Metrics:
    """Metric sums without gradient, over the micro-batches of all ranks; a coupled loss sees them all at once."""
    with torch.no_grad():
        if objective.couples_pairs:
            own = [pair_logps(micro, score(micro.pairs)) for micro in micro_batches]
            joined = concat_pairs(ranks.all_gather_pairs(concat_pairs(own or [_no_pairs(objective)])))
            metrics = ranks.only_on_rank0(objective(joined).metrics)
        else:
            metrics = {}
            for micro in micro_batches:
                metrics = merge_metrics([metrics, objective(pair_logps(micro, score(micro.pairs))).metrics])
            metrics = metrics or objective(_no_pairs(objective)).metrics
    return ranks.all_reduce_metrics(metrics)[0]


def pair_logps(micro: MicroBatch, policy: ChosenRejectedLogps) -> ObjectiveInputs:
    """Everything the objective may see of a micro-batch."""
    return ObjectiveInputs(
        policy=policy,
        reference=micro.reference,
        weight=_column([pair.weight for pair in micro.pairs.pairs], 1.0, policy),
        margin=_column([pair.margin for pair in micro.pairs.pairs], 0.0, policy),
    )


def _column(values: list[float], neutral: float, policy: ChosenRejectedLogps) -> Tensor | None:
    """A column that says nothing is none: losses that do not know it need not refuse it."""
    if all(value == neutral for value in values):
        return None
    return torch.tensor(values, dtype=torch.float32, device=policy.chosen.values.device)


def _no_pairs(objective: Objective) -> ObjectiveInputs:
    """What the objective sees of an empty share: every metric by its name, with a count of 0."""
    sides = empty_logps(with_squared_probs=objective.needs_squared_probs)
    return ObjectiveInputs(sides, sides if objective.needs_reference else None)


def _with_leaves(pairs: ObjectiveInputs) -> ObjectiveInputs:
    return replace(pairs, policy=ChosenRejectedLogps(_as_leaf(pairs.policy.chosen), _as_leaf(pairs.policy.rejected)))


def _as_leaf(side: ResponseLogps) -> ResponseLogps:
    return ResponseLogps(side.values.detach().requires_grad_(), side.lengths, side.log_sum_squared_probs)
