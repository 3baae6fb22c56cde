"""The end of a training step, for every engine: reduce, measure and clip the gradient, then update or skip."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple
from typing import Protocol

from thresher.distributed.groups import DataParallelGroup
from thresher.losses.metrics import MetricSum
from thresher.losses.objective import Objective
from thresher.strategies.accumulate import LocalStepResult
from thresher.strategies.loss_scale import LossScale
from thresher.strategies.nonfinite import NonFiniteStep, find_nonfinite_pairs, nonfinite_reason
from thresher.strategies.strategy import StepOutcome, TokenCounts


class StepParameters(Protocol):
    """The trainable parameters of an engine, with the gradient of a step; methods in the order of their calls."""

    def reduce_gradients(self) -> None:
        """Sum the gradients of the step over ranks, if the backward has not done so."""
        ...

    def count_zeros(self) -> int:
        """Count the elements of the reduced gradients that are 0, each once over all processes; a collective call."""
        ...

    def unscale(self, loss_scale: float) -> None:
        """Divide the gradients by the loss scale."""
        ...

    def clip(self, max_norm: float) -> float:
        """Scale the gradients to a global norm of at most max_norm (0: no clipping); return the norm before."""
        ...

    def zero_grad(self) -> None:
        """Drop the gradients."""
        ...


def finish_step(
    parameters: StepParameters,
    update: Callable[[float], None],
    local: LocalStepResult,
    objective: Objective,
    dp_group: DataParallelGroup,
    *,
    learning_rate: float,
    max_grad_norm: float,
    counts_zeros: bool = False,
    loss_scale: LossScale | None = None,
) -> StepOutcome:
    """Make one optimizer step; a non-finite loss or gradient leaves weights and optimizer state unchanged.

    update: makes the optimizer step with a learning rate. local: this rank's result of the backward, whose gradients
    the parameters have.
    """
    parameters.reduce_gradients()
    # the reduced numbers are equal on every process, so all decide alike whether to skip the step
    metrics, tokens = dp_group.metrics_group.all_reduce_metrics(local.metrics, astuple(local.tokens))
    if counts_zeros:
        metrics = metrics | {"num_zeros_in_grad": MetricSum(float(parameters.count_zeros()), 1.0)}
    if loss_scale is not None:
        parameters.unscale(loss_scale.value)
    grad_norm = parameters.clip(max_grad_norm)
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
    return StepOutcome(metrics, grad_norm, TokenCounts(*tokens), nonfinite)
