"""Training with the native engine: plain torch on one device per process, on a model that is already parallelized."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from thresher.checkpoint.collective_save import Write
from thresher.checkpoint.sharded import HostBuffers
from thresher.data.pair import PairBatch
from thresher.losses.objective import Objective
from thresher.losses.pairs import ChosenRejectedLogps
from thresher.models.layouts import Layout
from thresher.models.loading.lora import adapter_disabled
from thresher.strategies.accumulate import LocalStepResult, accumulate_gradients
from thresher.strategies.native.checkpoint import PolicyCheckpoint
from thresher.strategies.native.infer import NativeInfer
from thresher.strategies.native.parallelize import ParallelContext
from thresher.strategies.native.parameters import LocalParameters, ParameterCounts
from thresher.strategies.nonfinite import NonFiniteStep, find_nonfinite_pairs, nonfinite_reason
from thresher.strategies.strategy import MicroBatch, StepOutcome, TokenCounts


@dataclass(frozen=True)
class OptimizerSettings:
    """AdamW and gradient clipping; max_grad_norm 0 disables clipping. Every step sets its own learning rate."""

    learning_rate: float
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    max_grad_norm: float = 1.0


class NativeTrain:
    """A policy in training, or one data-parallel replica of it."""

    def __init__(
        self,
        model: nn.Module,
        layout: Layout,
        compute_dtype: torch.dtype,
        optimizer: OptimizerSettings,
        parallel: ParallelContext = ParallelContext(),  # noqa: B008  # frozen
        parameter_counts: ParameterCounts | None = None,
    ):
        """parameter_counts: of the whole model, if this process holds a part of it."""
        self.model = model
        self.parameter_counts = parameter_counts or ParameterCounts.of(model)
        self.dp_group = parallel.dp_group
        self._infer = NativeInfer(model, layout, compute_dtype, parallel)
        self._pair_model = self._infer.pair_model
        self._max_grad_norm = optimizer.max_grad_norm
        self._parameters = LocalParameters(model, self._pair_model.base_model, parallel)
        self._optimizer = _adamw(list(self._parameters.shards.values()), optimizer)
        self._checkpoint = PolicyCheckpoint(self._parameters, self._optimizer, parallel)
        model.train()

    def train_step(
        self,
        micro_batches: Sequence[MicroBatch],
        objective: Objective,
        *,
        num_pairs_in_step: int,
        learning_rate: float,
    ) -> StepOutcome:
        """Make one optimizer step; a non-finite loss or gradient leaves weights and optimizer state unchanged."""
        local = self.accumulate(micro_batches, objective, num_pairs_in_step)
        self._parameters.reduce_gradients()
        # the reduced numbers are equal on every process, so all decide alike whether to skip the step
        metrics, tokens = self.dp_group.metrics_group.all_reduce_metrics(local.metrics, astuple(local.tokens))
        grad_norm = self._parameters.clip(self._max_grad_norm)
        nonfinite = None
        if reason := nonfinite_reason(metrics, grad_norm):
            pairs = find_nonfinite_pairs(local.scored_pairs, self.dp_group, couples_pairs=objective.couples_pairs)
            nonfinite = NonFiniteStep(reason, pairs)
        else:
            for group in self._optimizer.param_groups:
                group["lr"] = learning_rate
            self._optimizer.step()
        self._parameters.zero_grad()
        return StepOutcome(metrics, grad_norm, TokenCounts(*tokens), nonfinite)

    def compile(self) -> None:
        self._infer.compile()

    def accumulate(
        self, micro_batches: Sequence[MicroBatch], objective: Objective, num_pairs_in_step: int
    ) -> LocalStepResult:
        """Add this rank's term of the step's gradient to the parameters, not yet reduced over ranks."""
        return accumulate_gradients(self._infer.executor, micro_batches, objective, num_pairs_in_step, self.dp_group)

    def score(self, batch: PairBatch, *, with_squared_probs: bool = False) -> ChosenRejectedLogps:
        return self._infer.score(batch, with_squared_probs=with_squared_probs)

    def score_base(self, batch: PairBatch) -> ChosenRejectedLogps:
        with adapter_disabled(self.model):
            return self._infer.score(batch)

    def check_logps(self, batch: PairBatch) -> None:
        self._infer.check_logps(batch)

    def weights(self) -> Mapping[str, Tensor]:
        return {name: p.detach() for p, name in self._parameters.names.items()}

    @property
    def device(self) -> torch.device:
        return self._pair_model.device

    @property
    def hidden_size(self) -> int:
        return self._pair_model.hidden_size

    def snapshot(self, extra: Mapping[str, Mapping[str, Tensor]], copies: HostBuffers | None = None) -> Write:
        return self._checkpoint.snapshot(extra, copies)

    def load(self, directory: Path) -> None:
        self._checkpoint.load(directory)


def _adamw(parameters: list[nn.Parameter], settings: OptimizerSettings) -> torch.optim.AdamW:
    # norms and biases are not decayed, as is usual; a shard has as many dims as its parameter
    decayed = [p for p in parameters if p.ndim >= 2]
    others = [p for p in parameters if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        groups,  # even an empty one: every process has the same groups, for any sharding
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        eps=settings.epsilon,
        fused=True,
    )
