"""Micro-batches to gradients, for every engine: score, objective, one division by the pairs of the whole step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from thresher.data.batch import PairBatch
from thresher.losses.metrics import merge_metrics
from thresher.losses.objective import Objective
from thresher.losses.pairs import PairLogps, ResponseLogps, SidesLogps, concat_pairs
from thresher.strategies.ranks import DataRanks, Metrics
from thresher.strategies.strategy import MicroBatch

Score = Callable[[PairBatch], SidesLogps]
Backward = Callable[[Tensor], object]


def accumulate_gradients(
    score: Score,
    backward: Backward,
    micro_batches: Sequence[MicroBatch],
    objective: Objective,
    num_pairs_in_step: int,
    ranks: DataRanks,
) -> Metrics:
    """Add this rank's part of the step's gradient to the parameters and return its part of the metric sums.

    A rank may hold no pair of a step that has fewer pairs than ranks.
    """
    if objective.couples_pairs:
        return _accumulate_coupled(score, backward, micro_batches, objective, num_pairs_in_step, ranks)
    if not micro_batches:
        return objective(_no_pairs(objective)).metrics
    metrics: list[Metrics] = []
    for micro in micro_batches:
        output = objective(pair_logps(micro, score(micro.pairs)))
        # sum, not mean: micro-batches and ranks hold different pair counts, so divide once, globally
        backward(output.per_pair.sum() / num_pairs_in_step)
        metrics.append(output.metrics)
    return merge_metrics(metrics)


def _accumulate_coupled(
    score: Score,
    backward: Backward,
    micro_batches: Sequence[MicroBatch],
    objective: Objective,
    num_pairs_in_step: int,
    ranks: DataRanks,
) -> Metrics:
    """Losses that couple all pairs of a step: score everything first, then send each micro-batch its own gradient.

    One more forward than other losses, and exact for any micro-batch size and number of ranks: the objective sees the
    whole step at once and its gradient with respect to every logp is the chain rule's outer factor.
    """
    # forked: the second pass draws the same dropout masks again
    with torch.no_grad(), torch.random.fork_rng():
        scored = [pair_logps(micro, score(micro.pairs)) for micro in micro_batches]
    parts = ranks.gather_pairs(concat_pairs(scored or [_no_pairs(objective)]))
    own = parts[ranks.rank] = _with_leaves(parts[ranks.rank])
    output = objective(concat_pairs(parts))
    total = output.per_pair.sum() / num_pairs_in_step
    leaves = [own.policy.chosen.values, own.policy.rejected.values]
    chosen, rejected = torch.autograd.grad(total, leaves, materialize_grads=True)
    of_chosen = chosen.split([pairs.policy.chosen.values.numel() for pairs in scored])
    of_rejected = rejected.split([pairs.policy.rejected.values.numel() for pairs in scored])
    for micro, chosen_factor, rejected_factor in zip(micro_batches, of_chosen, of_rejected, strict=True):
        policy = score(micro.pairs)
        chosen_part = (policy.chosen.values * chosen_factor).sum()
        backward(chosen_part + (policy.rejected.values * rejected_factor).sum())
    return ranks.once(output.metrics)


def evaluate_objective(
    score: Score, micro_batches: Iterable[MicroBatch], objective: Objective, ranks: DataRanks
) -> Metrics:
    """Metric sums without gradient, over the micro-batches of all ranks; a coupled loss sees them all at once."""
    with torch.no_grad():
        if objective.couples_pairs:
            own = [pair_logps(micro, score(micro.pairs)) for micro in micro_batches]
            joined = concat_pairs(ranks.gather_pairs(concat_pairs(own or [_no_pairs(objective)])))
            metrics = ranks.once(objective(joined).metrics)
        else:
            metrics = {}
            for micro in micro_batches:
                metrics = merge_metrics([metrics, objective(pair_logps(micro, score(micro.pairs))).metrics])
            metrics = metrics or objective(_no_pairs(objective)).metrics
    return ranks.sum_metrics(metrics)[0]


def pair_logps(micro: MicroBatch, policy: SidesLogps) -> PairLogps:
    """Everything the objective may see of a micro-batch."""
    return PairLogps(
        policy=policy,
        reference=micro.reference,
        weight=_column([pair.weight for pair in micro.pairs.pairs], 1.0, policy),
        margin=_column([pair.margin for pair in micro.pairs.pairs], 0.0, policy),
    )


def _column(values: list[float], neutral: float, policy: SidesLogps) -> Tensor | None:
    """A column that says nothing is none: losses that do not know it need not refuse it."""
    if all(value == neutral for value in values):
        return None
    return torch.tensor(values, dtype=torch.float32, device=policy.chosen.values.device)


def _no_pairs(objective: Objective) -> PairLogps:
    """What the objective sees of an empty share: every metric by its name, with a count of 0."""
    empty = torch.zeros(0)
    side = ResponseLogps(empty, empty.long(), empty if objective.needs_log_collision else None)
    sides = SidesLogps(side, side)
    return PairLogps(sides, sides if objective.needs_reference else None)


def _with_leaves(pairs: PairLogps) -> PairLogps:
    return replace(pairs, policy=SidesLogps(_as_leaf(pairs.policy.chosen), _as_leaf(pairs.policy.rejected)))


def _as_leaf(side: ResponseLogps) -> ResponseLogps:
    return ResponseLogps(side.values.detach().requires_grad_(), side.lengths, side.log_collision)
