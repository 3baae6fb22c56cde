"""Trained parameters under DeepSpeed: gradient norm, clipping, and the optimizer step.

DeepSpeed reduces gradients in the last backward of a step: stages 0 to 2 sum them, and stage 3, which can only average,
leaves a factor to the optimizer. The sum over ranks is therefore `_sum_factor` times the reduced gradient.
"""

from __future__ import annotations

import math
from typing import Any

from torch import nn

from thresher.distributed.groups import Group
from thresher.strategies.deepspeed.optimizer import PartitionedAdamW
from thresher.strategies.deepspeed.partitions import Partition


class PartitionedParameters:
    """The partitions of this process, with the factor that scales their gradients in the next step."""

    def __init__(self, engine: Any, optimizer: PartitionedAdamW, partitions: list[Partition], world: Group, stage: int):
        self._engine, self._optimizer, self._partitions, self._world = engine, optimizer, partitions, world
        self._sum_factor = float(world.size) if stage == 3 else 1.0
        # every rank has the whole gradient at stage 0; one of them measures it
        self._measured = partitions if stage or world.rank == 0 else []
        self._factor = self._sum_factor
        self._has_gradients = False

    def reduce_gradients(self) -> None:
        self._factor = self._sum_factor
        self._has_gradients = True

    def count_zeros(self) -> int:
        gradients = [gradient for each in self._measured if (gradient := each.gradient()) is not None]
        local = sum(gradient.numel() - int(gradient.count_nonzero()) for gradient in gradients)
        _, (total,) = self._world.all_reduce([], [local])
        return total

    def unscale(self, loss_scale: float) -> None:
        self._factor /= loss_scale

    def clip(self, max_norm: float) -> float:
        gradients = [gradient for each in self._measured if (gradient := each.gradient()) is not None]
        local = float(nn.utils.get_total_norm(gradients)) * self._factor if gradients else 0.0
        (square,), _ = self._world.all_reduce([local**2])
        norm = math.sqrt(square)
        if max_norm and norm > max_norm:
            self._factor *= max_norm / (norm + 1e-6)
        return norm

    def update(self, learning_rate: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.gradient_factor = self._factor
        self._engine.step()
        self._has_gradients = False

    def zero_grad(self) -> None:
        if self._has_gradients:  # of a step that is skipped
            self._optimizer.gradient_factor = None
            self._engine.step()
            self._has_gradients = False
