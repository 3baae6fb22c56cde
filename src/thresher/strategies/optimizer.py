"""The optimizer of every strategy: AdamW, with matrices decayed and all other parameters not."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class OptimizerSettings:
    """AdamW and gradient clipping; max_grad_norm 0 disables clipping. Every step sets its own learning rate.

    counts_zeros: add the metric num_zeros_in_grad. initial_loss_scale and loss_scale_window: of fp16 (see
    loss_scale.py).
    """

    learning_rate: float
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    max_grad_norm: float = 1.0
    counts_zeros: bool = False
    initial_loss_scale: float = 2.0**16
    loss_scale_window: int = 2000


def parameter_groups(
    parameters: Iterable[nn.Parameter],
    weight_decay: float,
    num_dims: Callable[[nn.Parameter], int] = lambda parameter: parameter.ndim,
) -> list[dict[str, Any]]:
    """Two groups, even if one is empty: every process has the same groups, for any sharding.

    num_dims: of the whole parameter, for shards that have lost its shape.
    """
    parameters = list(parameters)
    # norms and biases are not decayed, as is usual
    decayed = [p for p in parameters if num_dims(p) >= 2]
    others = [p for p in parameters if num_dims(p) < 2]
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


def adamw(parameters: Iterable[nn.Parameter], settings: OptimizerSettings) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        parameter_groups(parameters, settings.weight_decay),
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        eps=settings.epsilon,
        fused=True,
    )
