"""A training step of every engine: accumulate, reduce, measure and clip the gradient, then update or skip.

All numbers that the processes must agree on travel in one message between devices: the squared norm of the gradient,
the metrics, the counts of tokens and whether to stop. The host waits for the device once, to read their sums.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import astuple
from typing import Protocol

import torch
from torch import Tensor

from thresher.distributed.groups import DataParallelGroup
from thresher.losses.metrics import MetricSum
from thresher.losses.objective import Objective
from thresher.strategies.accumulate import MicroBatchExecutor, accumulate_gradients
from thresher.strategies.loss_scale import LossScale
from thresher.strategies.nonfinite import NonFiniteStep, find_nonfinite_pairs, nonfinite_reason
from thresher.strategies.strategy import MicroBatch, StepDiscarded, StepOutcome, StopRequested, TokenCounts, never


class StepParameters(Protocol):
    """The trainable parameters of an engine, with the gradient of a step; methods in the order of their calls."""

    def reduce_gradients(self) -> None:
        """Sum the gradients of the step over ranks, if the backward has not done so."""
        ...

    def count_zeros(self) -> Tensor | float:
        """Count this process's elements of the reduced gradients that are 0; each element belongs to one process."""
        ...

    def unscale(self, loss_scale: float) -> None:
        """Divide the gradients by the loss scale."""
        ...

    def squared_norm(self) -> Tensor | float:
        """The sum of the squares of this process's elements of the reduced gradients, in fp64."""
        ...

    def scale(self, factor: float) -> None:
        """Multiply the gradients."""
        ...

    def zero_grad(self) -> None:
        """Drop the gradients."""
        ...


def make_step(
    parameters: StepParameters,
    update: Callable[[float], None],
    executor: MicroBatchExecutor,
    micro_batches: Sequence[MicroBatch],
    objective: Objective,
    dp_group: DataParallelGroup,
    *,
    num_pairs_in_step: int,
    learning_rate: float,
    max_grad_norm: float,
    device: torch.device,
    counts_zeros: bool = False,
    loss_scale: LossScale | None = None,
    stop_requested: StopRequested = never,
) -> StepOutcome:
    """Make one optimizer step; a non-finite loss or gradient leaves weights and optimizer state unchanged.

    executor: adds this rank's gradients to the parameters. update: makes the optimizer step with a learning rate.
    stop_requested: whether this process asks all of them to stop after the step.
    """
    scale = None if loss_scale is None else loss_scale.value
    try:
        local = accumulate_gradients(
            executor, micro_batches, objective, num_pairs_in_step, dp_group, scale, stop_requested
        )
    except StepDiscarded:
        parameters.zero_grad()
        raise
    parameters.reduce_gradients()
    zeros = parameters.count_zeros() if counts_zeros else 0.0
    if loss_scale is not None:
        parameters.unscale(loss_scale.value)
    own: list[Tensor | float] = [number for metric in local.metrics.values() for number in (metric.sum, metric.count)]
    own += astuple(local.tokens)
    if not dp_group.adds_metrics:
        own = [0.0] * len(own)
    # the sums are equal on every process, so all decide alike whether to skip the step
    square, num_zeros, stops, *sums = dp_group.world.sum_numbers(
        [parameters.squared_norm(), zeros, float(stop_requested()), *own], device
    )
    grad_norm, num_metrics = math.sqrt(square), len(local.metrics)
    metrics = {name: MetricSum(*sums[2 * at : 2 * at + 2]) for at, name in enumerate(local.metrics)}
    if counts_zeros:
        metrics["num_zeros_in_grad"] = MetricSum(num_zeros, 1.0)
    if max_grad_norm and grad_norm > max_grad_norm:
        parameters.scale(max_grad_norm / (grad_norm + 1e-6))
    reason = nonfinite_reason(metrics, grad_norm)
    if loss_scale is not None:
        reason = loss_scale.after_step(reason)
    nonfinite = None
    if reason is None:
        update(learning_rate)
    else:
        # an overflow of fp16 is the fault of no pair
        pairs = (
            {}
            if reason == "overflow"
            else find_nonfinite_pairs(local.scored_pairs, dp_group, couples_pairs=objective.couples_pairs)
        )
        nonfinite = NonFiniteStep(reason, pairs, None if loss_scale is None else loss_scale.value)
    parameters.zero_grad()
    tokens = TokenCounts(*map(int, sums[2 * num_metrics :]))
    return StepOutcome(metrics, grad_norm, tokens, nonfinite, stop_requested=stops > 0)
