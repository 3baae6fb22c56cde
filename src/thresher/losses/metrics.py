"""What a step reports: sums with counts, so that no way of splitting a step can change a logged mean.

Computed once, detached, in fp64. Knobs don't change the meaning of a metric: logps, kl and sft_loss are never
LD-weighted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thresher.losses.pairs import PairLogps, SidesLogps


@dataclass(frozen=True)
class MetricSum:
    """A sum and what it is to be divided by, once, after all ranks and micro-batches are added up."""

    sum: Tensor | float
    count: Tensor | float

    @property
    def mean(self) -> float:
        return float(self.sum) / float(self.count) if float(self.count) else 0.0

    def merge(self, other: "MetricSum") -> "MetricSum":
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
def measure(pairs: PairLogps, per_pair: Tensor, rewards: tuple[Tensor, Tensor]) -> dict[str, MetricSum]:
    """Sum every metric of these pairs; rewards are those of the objective's first loss that compares sides.

    kl: (policy - reference) summed logps, averaged over the two sides of a pair, in nats a response. It estimates the
    KL to the reference on the data's responses and may be negative. Only with a reference.
    """
    chosen, rejected = wide(rewards[0]), wide(rewards[1])
    policy_chosen, policy_rejected = _sums(pairs.policy)
    tokens = pairs.policy.chosen.values
    wins = (chosen > rejected).to(chosen.dtype) + 0.5 * (chosen == rejected).to(chosen.dtype)  # a tie is half a win
    per_pair_metrics = {
        "loss": wide(per_pair),
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/accuracies": wins,
        "rewards/margins": chosen - rejected,
        "logps/chosen": policy_chosen,
        "logps/rejected": policy_rejected,
        "lengths/chosen": wide(pairs.policy.chosen.lengths),
        "lengths/rejected": wide(pairs.policy.rejected.lengths),
    }
    if pairs.reference is not None:
        reference_chosen, reference_rejected = _sums(pairs.reference)
        per_pair_metrics["kl"] = 0.5 * (policy_chosen - reference_chosen + policy_rejected - reference_rejected)
    metrics = {name: MetricSum(values.sum(), pairs.num_pairs) for name, values in per_pair_metrics.items()}
    metrics["sft_loss"] = MetricSum(-wide(tokens).sum(), tokens.numel())
    return metrics


def wide(values: Tensor) -> Tensor:
    """Detach and widen to fp64, or to fp32 on the one device type that has no fp64."""
    return values.detach().to(torch.float32 if values.device.type == "mps" else torch.float64)


def _sums(sides: SidesLogps) -> tuple[Tensor, Tensor]:
    return wide(sides.chosen.sums()), wide(sides.rejected.sums())
