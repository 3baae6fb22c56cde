"""Micro-batches to gradients, for every engine: score, objective, one division by the pairs of the whole step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from thresher.data.batch import PairBatch
from thresher.losses.metrics import MetricSum, merge_metrics
from thresher.losses.objective import Objective
from thresher.losses.pairs import PairLogps, ResponseLogps, SidesLogps, concat_pairs
from thresher.strategies.strategy import Metrics, MicroBatch

Score = Callable[[PairBatch], SidesLogps]
Backward = Callable[[Tensor], object]


def accumulate_gradients(
    score: Score,
    backward: Backward,
    micro_batches: Sequence[MicroBatch],
    objective: Objective,
    num_pairs_in_step: int,
) -> Metrics:
    """Add the step's gradient to the parameters and return the metric sums."""
    if objective.couples_pairs:
        return _accumulate_coupled(score, backward, micro_batches, objective, num_pairs_in_step)
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
) -> Metrics:
    """Losses that couple all pairs of a step: score everything first, then send each micro-batch its own gradient.

    One more forward than other losses, and exact for any micro-batch size: the objective sees the whole step at once
    and its gradient with respect to every logp is the chain rule's outer factor.
    """
    # forked: the second pass draws the same dropout masks again
    with torch.no_grad(), torch.random.fork_rng():
        scored = [score(micro.pairs) for micro in micro_batches]
    chosen = [_as_leaf(sides.chosen) for sides in scored]
    rejected = [_as_leaf(sides.rejected) for sides in scored]
    joined = concat_pairs(
        [pair_logps(m, SidesLogps(c, r)) for m, c, r in zip(micro_batches, chosen, rejected, strict=True)]
    )
    output = objective(joined)
    total = output.per_pair.sum() / num_pairs_in_step
    gradients = torch.autograd.grad(total, [side.values for side in (*chosen, *rejected)])
    for i, micro in enumerate(micro_batches):
        policy = score(micro.pairs)
        chosen_part = (policy.chosen.values * gradients[i]).sum()
        backward(chosen_part + (policy.rejected.values * gradients[len(chosen) + i]).sum())
    return output.metrics


def evaluate_objective(score: Score, micro_batches: Iterable[MicroBatch], objective: Objective) -> Metrics:
    """Metric sums without gradient, over all micro-batches; a coupled loss sees them all at once."""
    with torch.no_grad():
        if objective.couples_pairs:
            joined = concat_pairs([pair_logps(micro, score(micro.pairs)) for micro in micro_batches])
            return objective(joined).metrics
        metrics: dict[str, MetricSum] = {}
        for micro in micro_batches:
            metrics = merge_metrics([metrics, objective(pair_logps(micro, score(micro.pairs))).metrics])
        return metrics


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


def _as_leaf(side: ResponseLogps) -> ResponseLogps:
    return ResponseLogps(side.values.detach().requires_grad_(), side.lengths, side.log_collision)
