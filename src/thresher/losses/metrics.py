"""Step metrics, as sums with counts, so logged means do not depend on how a step is split.

Computed once, detached, in fp64. Modifiers do not change the meaning of a metric: logps, kl and sft_loss are never
LD-weighted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thresher.losses.pairs import ObjectiveInputs, ResponseLogps, segment_sums, to_fp64
from thresher.losses.scores import ChosenRejected

# units in the last place of a logp by which two forwards of the same weights may differ
_ROUNDING_ULPS = 8.0


@dataclass(frozen=True)
class MetricSum:
    """A sum and its count; divide once, after adding up all ranks and micro-batches."""

    sum: Tensor | float
    count: Tensor | float

    @property
    def mean(self) -> float:
        return float(self.sum) / float(self.count) if float(self.count) else 0.0

    def merge(self, other: MetricSum) -> MetricSum:
        """Add up two parts of a step."""
        return MetricSum(self.sum + other.sum, self.count + other.count)


def merge_metrics(parts: Sequence[Mapping[str, MetricSum]]) -> dict[str, MetricSum]:
    """Add up the metrics of several micro-batches or ranks, name by name."""
    total: dict[str, MetricSum] = {}
    for part in parts:
        for name, metric in part.items():
            total[name] = total[name].merge(metric) if name in total else metric
    return total


@torch.no_grad()
def compute_metrics(inputs: ObjectiveInputs, per_pair: Tensor, rewards: ChosenRejected) -> dict[str, MetricSum]:
    """Sum every metric over these pairs; rewards come from the objective's first loss that compares both sides.

    kl: the log-ratio on the data, (policy - reference) summed logps, averaged over the two sides of a pair, in nats per
    response. It is not an expectation over the policy, and so may be negative. Present only with a reference.
    """
    chosen, rejected = rewards
    policy_chosen, policy_rejected = inputs.policy.chosen.sums(), inputs.policy.rejected.sums()
    tokens = inputs.policy.chosen.values
    is_tie, kl = chosen == rejected, None
    if inputs.reference is not None:
        chosen_ratio = policy_chosen - inputs.reference.chosen.sums()
        rejected_ratio = policy_rejected - inputs.reference.rejected.sums()
        kl = 0.5 * (chosen_ratio + rejected_ratio)
        # the policy equals its reference, as in the first step: rounding must not decide which side wins
        is_tie |= (chosen_ratio.abs() <= _rounding(inputs.policy.chosen)) & (
            rejected_ratio.abs() <= _rounding(inputs.policy.rejected)
        )
    per_pair_metrics = {
        "loss": to_fp64(per_pair),
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/accuracies": torch.where(is_tie, 0.5, (chosen > rejected).to(chosen.dtype)),
        "rewards/margins": chosen - rejected,
        "logps/chosen": policy_chosen,
        "logps/rejected": policy_rejected,
        "lengths/chosen": to_fp64(inputs.policy.chosen.lengths),
        "lengths/rejected": to_fp64(inputs.policy.rejected.lengths),
        **({} if kl is None else {"kl": kl}),
    }
    metrics = {name: MetricSum(values.sum(), inputs.num_pairs) for name, values in per_pair_metrics.items()}
    metrics["sft_loss"] = MetricSum(-to_fp64(tokens).sum(), tokens.numel())
    return metrics | _length_preference(inputs, torch.where(is_tie, 0.0, chosen - rejected)) | _entropy(inputs)


def _length_preference(inputs: ObjectiveInputs, margins: Tensor) -> dict[str, MetricSum]:
    """Share of pairs whose longer response is the chosen one, and in which it has the higher reward."""
    difference = inputs.policy.chosen.lengths - inputs.policy.rejected.lengths
    differs = difference != 0
    count = differs.sum()
    prefers_longer = torch.where(margins == 0.0, 0.5, ((margins > 0.0) == (difference > 0)).to(margins.dtype))
    return {
        "lengths/longer_chosen": MetricSum((difference > 0).sum(dtype=margins.dtype), count),
        "lengths/longer_preferred": MetricSum((prefers_longer * differs).sum(), count),
    }


def _entropy(inputs: ObjectiveInputs) -> dict[str, MetricSum]:
    """Entropy of the policy at all scored tokens, in nats per token; absent unless it was requested."""
    sides = [side.entropy for side in (inputs.policy.chosen, inputs.policy.rejected) if side.entropy is not None]
    if not sides:
        return {}
    return {"entropy": MetricSum(sum(to_fp64(side).sum() for side in sides), sum(side.numel() for side in sides))}


def _rounding(side: ResponseLogps) -> Tensor:
    """Rounding error of each response's sum, in nats: [num_pairs]; errors of tokens add up like random numbers."""
    squares = segment_sums(to_fp64(side.values).square(), side.lengths)
    return _ROUNDING_ULPS * torch.finfo(side.values.dtype).eps * squares.sqrt()
