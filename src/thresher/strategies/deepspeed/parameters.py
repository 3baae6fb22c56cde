"""Trained parameters under DeepSpeed: gradient norm, clipping, and the optimizer step.

DeepSpeed reduces gradients in the last backward of a step: stages 0 to 2 sum them, and stage 3, which can only average,
leaves a factor to the optimizer. The sum over ranks is therefore `_sum_factor` times the reduced gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from thresher.distributed.groups import Group
from thresher.losses.pairs import to_fp64
from thresher.strategies.deepspeed.optimizer import PartitionedAdamW
from thresher.strategies.deepspeed.partitions import Partition


class PartitionedParameters:
    """The partitions of this process, with the factor that scales their gradients in the next step."""

    def __init__(self, engine: Any, optimizer: PartitionedAdamW, partitions: list[Partition], world: Group, stage: int):
        self._engine, self._optimizer = engine, optimizer
        self._sum_factor = float(world.size) if stage == 3 else 1.0
        # every rank has the whole gradient at stage 0; one of them measures it
        self._measured = partitions if stage or world.rank == 0 else []
        self._factor = self._sum_factor
        self._has_gradients = False

    def reduce_gradients(self) -> None:
        self._factor = self._sum_factor
        self._has_gradients = True

    def count_zeros(self) -> Tensor | float:
        gradients = self._measured_gradients()
        zeros = [gradient.numel() - gradient.count_nonzero() for gradient in gradients]
        return torch.stack(zeros).sum() if zeros else 0.0

    def unscale(self, loss_scale: float) -> None:
        self._factor /= loss_scale

    def squared_norm(self) -> Tensor | float:
        gradients = self._measured_gradients()
        return (to_fp64(nn.utils.get_total_norm(gradients)) * self._factor).square() if gradients else 0.0

    def scale(self, factor: float) -> None:
        self._factor *= factor

    def _measured_gradients(self) -> list[Tensor]:
        return [gradient for each in self._measured if (gradient := each.gradient()) is not None]

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
