"""AdamW that DeepSpeed drives: it hands over flat partitions with their reduced gradients, one group at a time.

DeepSpeed would clip with its own formula and decide itself whether to skip a step. Both are decided before, from the
gradient norm of the whole model, and applied here: `gradient_factor` scales the gradients, and None skips the step.
DeepSpeed then copies partitions that have not changed, and drops the gradients, as after any step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, overload

import torch

from thresher.strategies.optimizer import OptimizerSettings


class PartitionedAdamW(torch.optim.AdamW):
    """AdamW on the partitions of a ZeRO stage; gradient_factor: of the next step, None skips it."""

    gradient_factor: float | None = None

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        if self.gradient_factor is None:
            return None
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        if gradients and self.gradient_factor != 1.0:
            torch._foreach_mul_(gradients, self.gradient_factor)
        loss: float | None = super().step(closure)
        return loss


def partitioned_adamw(groups: list[dict[str, Any]], settings: OptimizerSettings) -> PartitionedAdamW:
    return PartitionedAdamW(
        groups,
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        eps=settings.epsilon,
        fused=True,
    )
