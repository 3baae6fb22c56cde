"""Step metrics, as sums with counts, so logged means do not depend on how a step is split.

Computed once, detached, in fp64. Modifiers do not change the meaning of a metric: logps, kl and sft_loss are never
LD-weighted.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thresher.losses.pairs import ExampleLogps, ObjectiveInputs, ResponseLogps, segment_sums, to_fp64
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


def mean_values(metrics: Mapping[str, MetricSum]) -> dict[str, float]:
    """Return the means of metrics with examples; for labels, also `rewards/margins`."""
    means = {name: metric.mean for name, metric in metrics.items() if float(metric.count)}
    for prefix in [name.removesuffix("labels/desirable") for name in means if name.endswith("labels/desirable")]:
        if {f"{prefix}rewards/chosen", f"{prefix}rewards/rejected"} <= means.keys():
            means[f"{prefix}rewards/margins"] = means[f"{prefix}rewards/chosen"] - means[f"{prefix}rewards/rejected"]
    return means


def of_sets(metrics: Mapping[str, Mapping[str, MetricSum]], common: Collection[str]) -> dict[str, MetricSum]:
    """The metrics that all evaluation sets have, over all of them, and those of each set under its name."""
    named = {f"{of}/{name}": each for of, found in metrics.items() if of for name, each in found.items()}
    return merge_metrics([{name: found[name] for name in common} for found in metrics.values()]) | named


@torch.no_grad()
def compute_metrics(
    inputs: ObjectiveInputs, rewards: ChosenRejected, is_valid: Tensor | None = None
) -> dict[str, MetricSum]:
    """Sum every metric over these pairs; rewards come from the objective's first loss that compares both sides.

    Pairs that are not valid do not count.

    kl: the log ratio on the data, (policy - reference) summed logps, averaged over the two sides of a pair, in nats per
    response. It is not an expectation over the policy, and so may be negative. Present only with a reference.
    """
    policy_chosen, policy_rejected = inputs.policy.chosen.sums(), inputs.policy.rejected.sums()
    tokens, kl = inputs.policy.chosen.values, None
    if (ratios := _log_ratios(inputs)) is not None:
        kl = 0.5 * (ratios[0] + ratios[1])
    of_pairs = pair_rewards(inputs, rewards)
    per_pair_metrics = {
        **of_pairs,
        "logps/chosen": policy_chosen,
        "logps/rejected": policy_rejected,
        "lengths/chosen": to_fp64(inputs.policy.chosen.lengths),
        "lengths/rejected": to_fp64(inputs.policy.rejected.lengths),
        **({} if kl is None else {"kl": kl}),
    }
    margins = torch.where(of_pairs["rewards/accuracies"] == 0.5, 0.0, of_pairs["rewards/margins"])
    if is_valid is None:
        metrics = {name: MetricSum(values.sum(), inputs.num_pairs) for name, values in per_pair_metrics.items()}
        metrics["sft_loss"] = MetricSum(-to_fp64(tokens).sum(), tokens.numel())
    else:
        metrics = {name: _mean_where(is_valid, values) for name, values in per_pair_metrics.items()}
        lengths = inputs.policy.chosen.lengths
        metrics["sft_loss"] = MetricSum(-(policy_chosen * is_valid).sum(), (lengths * is_valid).sum())
    return metrics | _length_preference(inputs, margins, is_valid)


def pair_rewards(inputs: ObjectiveInputs, rewards: ChosenRejected) -> dict[str, Tensor]:
    """The rewards of each pair, their difference, and 1 if the chosen side has more: [num_pairs] each."""
    chosen, rejected = rewards
    is_tie = chosen == rejected
    if (ratios := _log_ratios(inputs)) is not None:
        # the policy equals its reference, as in the first step: rounding must not decide which side wins
        is_tie |= (ratios[0].abs() <= _rounding(inputs.policy.chosen)) & (
            ratios[1].abs() <= _rounding(inputs.policy.rejected)
        )
    return {
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/accuracies": torch.where(is_tie, 0.5, (chosen > rejected).to(chosen.dtype)),
        "rewards/margins": chosen - rejected,
    }


def _log_ratios(inputs: ObjectiveInputs) -> tuple[Tensor, Tensor] | None:
    if inputs.reference is None:
        return None
    return (
        inputs.policy.chosen.sums() - inputs.reference.chosen.sums(),
        inputs.policy.rejected.sums() - inputs.reference.rejected.sums(),
    )


@torch.no_grad()
def label_metrics(
    policy: ResponseLogps, reference: ResponseLogps | None, per_example: Tensor, rewards: Tensor, labels: Tensor
) -> dict[str, MetricSum]:
    """Sum every metric over single responses; a label's metrics have the count of its responses."""
    logps, is_desirable = policy.sums(), labels > 0.5
    metrics = {
        "loss": MetricSum(to_fp64(per_example).sum(), per_example.numel()),
        "labels/desirable": MetricSum(is_desirable.sum(dtype=logps.dtype), labels.numel()),
    }
    for name, has_label in (("chosen", is_desirable), ("rejected", ~is_desirable)):
        metrics[f"rewards/{name}"] = _mean_where(has_label, rewards)
        metrics[f"logps/{name}"] = _mean_where(has_label, logps)
        metrics[f"lengths/{name}"] = _mean_where(has_label, to_fp64(policy.lengths))
    metrics["sft_loss"] = MetricSum(-(logps * is_desirable).sum(), (policy.lengths * is_desirable).sum())
    if reference is not None:
        metrics["kl"] = MetricSum((logps - reference.sums()).sum(), labels.numel())
    return metrics


def _mean_where(is_counted: Tensor, values: Tensor) -> MetricSum:
    return MetricSum(torch.where(is_counted, values, 0.0).sum(), is_counted.sum())


def _length_preference(inputs: ObjectiveInputs, margins: Tensor, is_valid: Tensor | None) -> dict[str, MetricSum]:
    """Share of pairs whose longer response is the chosen one, and in which it has the higher reward."""
    difference = inputs.policy.chosen.lengths - inputs.policy.rejected.lengths
    if is_valid is not None:
        difference = difference * is_valid
    differs = difference != 0
    count = differs.sum()
    prefers_longer = torch.where(margins == 0.0, 0.5, ((margins > 0.0) == (difference > 0)).to(margins.dtype))
    return {
        "lengths/longer_chosen": MetricSum((difference > 0).sum(dtype=margins.dtype), count),
        "lengths/longer_preferred": MetricSum((prefers_longer * differs).sum(), count),
    }


def entropy_metric(policy: ExampleLogps) -> dict[str, MetricSum]:
    """Entropy of the policy at all scored tokens, in nats per token; absent unless it was requested."""
    sides = [side.entropy for side in policy.sides if side.entropy is not None]
    if not sides:
        return {}
    return {"entropy": MetricSum(sum(to_fp64(side).sum() for side in sides), sum(side.numel() for side in sides))}


def _rounding(side: ResponseLogps) -> Tensor:
    """Rounding error of each response's sum, in nats: [num_pairs]; errors of tokens add up like random numbers."""
    squares = segment_sums(to_fp64(side.values).square(), side.lengths)
    return _ROUNDING_ULPS * torch.finfo(side.values.dtype).eps * squares.sqrt()
