"""The engine: a model on this process's device that scores pairs and, as a policy, makes optimizer steps.

There is one class for every engine. Native, DeepSpeed and Megatron-Core, and engines of other packages, build it from
their parts: an executor, which runs micro-batches through the model, and for a policy the trained parameters and their
checkpoint files. The trainer knows an engine's data-parallel group; all other parallel dimensions are inside the parts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from thresher.checkpoint.background import HostBuffers
from thresher.checkpoint.json_io import load_json
from thresher.checkpoint.save import Write
from thresher.checkpoint.tensor_files import Shard
from thresher.config.roles import TrainingArgs
from thresher.data.example import ExampleBatch
from thresher.distributed.groups import DataParallelGroup, Metrics
from thresher.engines.accumulate import (
    MicroBatch,
    MicroBatchExecutor,
    StepDiscarded,
    StopRequested,
    TokenCounts,
    accumulate_gradients,
    never,
)
from thresher.engines.nonfinite import LossScale, NonFiniteStep, ScoredPairs, find_nonfinite_pairs, nonfinite_reason
from thresher.engines.policy_files import LOSS_SCALE, OPTIMIZER, write_policy
from thresher.losses.metrics import MetricSum
from thresher.losses.objective import Objective
from thresher.losses.pairs import NO_STATISTICS, ExampleLogps, TokenStatistics


@dataclass(frozen=True)
class StepOutcome:
    """Result of one optimizer step; a skipped step (nonfinite is set) changed neither weights nor optimizer state."""

    metrics: Metrics
    grad_norm: float
    tokens: TokenCounts
    nonfinite: NonFiniteStep | None = None
    stop_requested: bool = False

    @property
    def skipped(self) -> bool:
        return self.nonfinite is not None

    @property
    def failed(self) -> bool:
        """Whether it was skipped for a different reason from a loss scale that is too large."""
        return self.nonfinite is not None and self.nonfinite.is_failure


class Scorer(Protocol):
    """A model that scores pairs without gradient."""

    def score(self, batch: ExampleBatch, *, statistics: TokenStatistics = NO_STATISTICS) -> ExampleLogps: ...


class TrainedParameters(Protocol):
    """The trained parameters of this process with their gradient and optimizer; methods in the order of a step.

    Every element of the model's gradient belongs to one process, which counts and measures it.
    """

    def reduce_gradients(self) -> None:
        """Sum the step's gradients over ranks, if the backward has not done so."""

    def count_zeros(self) -> Tensor | float:
        """Count this process's elements of the reduced gradient that are 0."""

    def scale(self, factor: float) -> None:
        """Multiply the gradients: by 1 / loss scale, and to clip them."""

    def squared_norm(self) -> Tensor | float:
        """The sum of squares over this process's elements of the reduced gradient, in fp64."""

    def update(self, learning_rate: float) -> None:
        """Make the optimizer step."""

    def zero_grad(self) -> None:
        """Drop the gradients."""

    def weights(self) -> Mapping[str, Tensor]:
        """This process's part of the trained weights, by name."""


class PolicyCheckpoint(Protocol):
    """The parts of a policy's checkpoint files that this process writes and reads; every method is collective.

    All engines name tensors as transformers and PEFT do and store weights and moments as slices of whole tensors, so a
    checkpoint can be loaded by a different engine, or a different number of processes.
    """

    def weight_shards(self, extra: Mapping[str, Mapping[str, Tensor]]) -> dict[str, dict[str, Shard]]:
        """The shards of the weights and of extra tensors that this process writes, by file stem and name.

        Extra tensors are sharded like the weights of the same name. Only a synced reference has them.
        """

    def optimizer_shards(self) -> tuple[dict[str, Shard], dict[str, Any] | None]:
        """This process's shards of the moments; and the other optimizer state, on the one process that writes it."""

    def load(self, directory: Path, values: dict[str, Any]) -> None:
        """Restore weights and optimizer state bitwise; values: optimizer state that is not tensors."""


@dataclass(eq=False)
class Engine:
    """A model that scores pairs: what every engine has, and all that a reference has."""

    model: nn.Module
    executor: MicroBatchExecutor
    # ranks that score different pairs of the same step
    dp_group: DataParallelGroup
    device: torch.device
    hidden_size: int

    @torch.no_grad()
    def score(self, batch: ExampleBatch, *, statistics: TokenStatistics = NO_STATISTICS) -> ExampleLogps:
        """Score a micro-batch in eval mode, then restore the model's mode."""
        was_training = self.model.training
        self.model.eval()
        try:
            return self.executor.score(batch, statistics=statistics).detach()
        finally:
            self.model.train(was_training)
            _reshard(self.model)

    def check_logps(self, batch: ExampleBatch) -> None:
        self.executor.check_logps(batch)
        _reshard(self.model)

    def weights(self) -> Mapping[str, Tensor]:
        """The weights by name, for a reference that follows the policy."""
        return {name: parameter.detach() for name, parameter in self.model.named_parameters()}

    @torch.no_grad()
    def ema_update(self, weights: Mapping[str, Tensor], alpha: float) -> None:
        """TR-DPO: set the weights to alpha * weights + (1 - alpha) * current."""
        for name, parameter in self.model.named_parameters():
            parameter.lerp_(weights[name].to(parameter), alpha)


@dataclass(eq=False)
class TrainEngine(Engine):
    """A policy in training, or this process's part of it."""

    parameters: TrainedParameters
    checkpoint: PolicyCheckpoint
    training: TrainingArgs
    # computes the base model within a `with` block; called only if the policy has an adapter
    adapter_disabled: Callable[[], AbstractContextManager[None]]
    # in fp16
    scaler: LossScale | None = None
    # around a step: for an optimizer that takes gradients at other weights than those of a checkpoint
    within_step: Callable[[HostBuffers | None], AbstractContextManager[None]] = lambda _: nullcontext()
    _copies: HostBuffers | None = field(default=None, init=False)

    def train_step(
        self,
        micro_batches: Sequence[MicroBatch],  # of this rank
        objective: Objective,
        *,
        num_pairs_in_step: int,  # over all ranks
        learning_rate: float,
        # called after the backward, and between the micro-batches of a slow step in a run of one process, which then
        # raises StepDiscarded without a change
        stop_requested: StopRequested = never,
    ) -> StepOutcome:
        """Make one optimizer step; a non-finite loss or gradient leaves weights and optimizer state unchanged.

        The outcome describes the whole step, and is equal on every rank. All numbers that the processes must agree on
        travel in one message between devices: the squared norm of the gradient, the metrics, the counts of tokens and
        whether to stop. The host waits for the device once, to read their sums.
        """
        parameters, training, dp_group = self.parameters, self.training, self.dp_group
        with self.within_step(self._copies):
            try:
                local, local_tokens, scored = self.accumulate(
                    micro_batches, objective, num_pairs_in_step, stop_requested
                )
            except StepDiscarded:
                parameters.zero_grad()
                raise
            parameters.reduce_gradients()
            zeros = parameters.count_zeros() if training.log_num_zeros_in_grad else 0.0
            if self.scaler is not None:
                parameters.scale(1.0 / self.scaler.value)
            own: list[Tensor | float] = [number for metric in local.values() for number in (metric.sum, metric.count)]
            own += astuple(local_tokens)
            if not dp_group.adds_metrics:
                own = [0.0] * len(own)
            # the sums are equal on every process, so all make the same decision to skip the step
            square, num_zeros, stops, *sums = dp_group.world.sum_numbers(
                [parameters.squared_norm(), zeros, float(stop_requested()), *own], self.device
            )
            grad_norm, num_metrics = math.sqrt(square), len(local)
            metrics = {name: MetricSum(*sums[2 * at : 2 * at + 2]) for at, name in enumerate(local)}
            if training.log_num_zeros_in_grad:
                metrics["num_zeros_in_grad"] = MetricSum(num_zeros, 1.0)
            if training.max_grad_norm and grad_norm > training.max_grad_norm:
                parameters.scale(training.max_grad_norm / (grad_norm + 1e-6))
            reason = nonfinite_reason(metrics, grad_norm)
            if self.scaler is not None:
                reason = self.scaler.after_step(reason)
            nonfinite = None
            if reason is None:
                if self._copies is not None:
                    self._copies.hold_changes()
                parameters.update(learning_rate)
            else:
                nonfinite = NonFiniteStep(reason, {}, self.loss_scale)
                if nonfinite.is_failure:  # an fp16 overflow is not caused by a single pair
                    pairs = find_nonfinite_pairs(scored, dp_group, couples_pairs=objective.couples_pairs)
                    nonfinite = replace(nonfinite, pairs=pairs)
            parameters.zero_grad()
        tokens = TokenCounts(*map(int, sums[2 * num_metrics :]))
        return StepOutcome(metrics, grad_norm, tokens, nonfinite, stop_requested=stops > 0)

    def accumulate(
        self,
        micro_batches: Sequence[MicroBatch],
        objective: Objective,
        num_pairs_in_step: int,
        stop_requested: StopRequested = never,
    ) -> tuple[Metrics, TokenCounts, list[ScoredPairs]]:
        """Add this rank's term of the step's gradient, times the loss scale, to the parameters; not yet reduced."""
        return accumulate_gradients(
            self.executor,
            micro_batches,
            objective,
            num_pairs_in_step,
            self.dp_group,
            self.device,
            self.loss_scale,
            stop_requested,
        )

    @property
    def loss_scale(self) -> float | None:
        """The next step's loss scale in fp16; None in other precisions."""
        return None if self.scaler is None else self.scaler.value

    def score_base(self, batch: ExampleBatch) -> ExampleLogps:
        """Score with the adapter disabled."""
        with self.adapter_disabled():
            return self.score(batch)

    def weights(self) -> Mapping[str, Tensor]:
        return self.parameters.weights()

    def snapshot(self, extra: Mapping[str, Mapping[str, Tensor]], copies: HostBuffers | None = None) -> Write:
        """Capture weights, optimizer state and extra tensors (by the stem of their files) at this step.

        Collective. The returned function writes this process's files; with copies, training may continue meanwhile.
        """
        self._copies = copies
        shards = self.checkpoint.weight_shards(extra)
        shards[OPTIMIZER], values = self.checkpoint.optimizer_shards()
        if values is not None and self.scaler is not None:
            values[LOSS_SCALE] = self.scaler.state()
        return write_policy(shards, values, self.dp_group.world, copies)

    def weight_files(self, extra: Mapping[str, Mapping[str, Tensor]]) -> Write:
        """Return a function that writes this process's files of the weights and the extra tensors alone.

        Collective, like the files of `snapshot`; training must not continue before they are written.
        """
        return write_policy(self.checkpoint.weight_shards(extra), None, self.dp_group.world, None)

    def load(self, directory: Path) -> None:
        """Restore weights, optimizer state and loss scale bitwise, whatever engine and processes wrote them."""
        values = load_json(directory / f"{OPTIMIZER}.json")
        self.checkpoint.load(directory, values)
        if self.scaler is not None and LOSS_SCALE in values:  # a checkpoint of bf16 or fp32 has none
            self.scaler.load(values[LOSS_SCALE])


def _reshard(model: nn.Module) -> None:
    """Free gathered weights: ZeRO-1 and 2 keep them after a forward without a backward, until they are stale."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
