"""The load-balancing loss of a mixture-of-experts model, over the tokens of a whole step.

transformers computes it per forward, so that it depends on the batch. Here the batch is the step: no split into
micro-batches and ranks changes the loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from thresher.distributed.groups import DataParallelGroup, Metrics
from thresher.losses.metrics import MetricSum
from thresher.models.router import ExpertLoad


@dataclass(frozen=True)
class StepBalance:
    """The loss of a step, times coef.

    The tokens routed to an expert have no gradient, so the loss is linear in the probabilities of the router. `factors`
    is its derivative: the shares of the micro-batches of all ranks add up to the loss.
    """

    factors: Sequence[float]
    metrics: Metrics

    def share(self, load: ExpertLoad) -> Tensor:
        return (load.probabilities.new_tensor(self.factors) * load.probabilities).sum()


@dataclass(frozen=True)
class RouterLoss:
    """Weight of the loss, and the data-parallel ranks that split a step."""

    coef: float
    num_experts: int
    dp_group: DataParallelGroup = field(default_factory=DataParallelGroup)

    def of_step(self, loads: Sequence[ExpertLoad | None]) -> StepBalance:
        """Sum the loads of this rank's micro-batches over all ranks; None: a dummy batch. A collective call."""
        local = [0.0] * (2 * self.num_experts + 1)
        for load in loads:
            if load is not None:
                numbers = [*load.routed.tolist(), *load.probabilities.tolist(), float(load.num_tokens)]
                local = [one + other for one, other in zip(local, numbers, strict=True)]
        (*sums, num_tokens), _ = self.dp_group.all_reduce(local)
        routed, probabilities = sums[: self.num_experts], sums[self.num_experts :]
        factors = [self.num_experts * each / num_tokens**2 for each in routed]
        value = sum(factor * each for factor, each in zip(factors, probabilities, strict=True))
        metrics = self.dp_group.metrics_group.only_on_rank0({"moe_aux_loss": MetricSum(value, 1.0)})
        return StepBalance([self.coef * factor for factor in factors], metrics)
