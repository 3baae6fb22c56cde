"""Training with the native engine: plain torch on one device per process, on a model that is already parallelized."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from thresher.checkpoint.background import HostBuffers
from thresher.checkpoint.save import Write
from thresher.data.pair import PairBatch
from thresher.losses.objective import Objective
from thresher.losses.pairs import NO_STATISTICS, ChosenRejectedLogps, TokenStatistics
from thresher.models.layouts import Layout
from thresher.models.loading.adapters import adapter_disabled
from thresher.models.optimizations.compile import Compilation
from thresher.strategies.accumulate import LocalStepResult, accumulate_gradients
from thresher.strategies.loss_scale import LossScale
from thresher.strategies.native.checkpoint import PolicyCheckpoint
from thresher.strategies.native.infer import NativeInfer
from thresher.strategies.native.parallelize import ParallelContext
from thresher.strategies.native.parameters import LocalParameters
from thresher.strategies.optimizer import OptimizerSettings, adamw
from thresher.strategies.step import make_step
from thresher.strategies.strategy import MicroBatch, ParameterCounts, StepOutcome, StopRequested, never


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
        *,
        router_loss_coef: float = 0.0,
    ):
        """parameter_counts: of the whole model, if this process holds a part of it.

        router_loss_coef: weight of the load-balancing loss of a mixture-of-experts model; 0 leaves it out.
        """
        self.model = model
        self.parameter_counts = parameter_counts or ParameterCounts.of(model)
        self.dp_group = parallel.dp_group
        self._infer = NativeInfer(model, layout, compute_dtype, parallel, router_loss_coef=router_loss_coef)
        self._pair_model = self._infer.pair_model
        self._max_grad_norm, self._counts_zeros = optimizer.max_grad_norm, optimizer.counts_zeros
        self._parameters = LocalParameters(model, self._pair_model.base_model, parallel)
        self._optimizer = adamw(self._parameters.shards.values(), optimizer)
        self._loss_scale = (
            LossScale(optimizer.initial_loss_scale, optimizer.loss_scale_window)
            if compute_dtype == torch.float16
            else None
        )
        self._copies: HostBuffers | None = None
        self._checkpoint = PolicyCheckpoint(self._parameters, self._optimizer, parallel, self._loss_scale)
        model.train()

    def train_step(
        self,
        micro_batches: Sequence[MicroBatch],
        objective: Objective,
        *,
        num_pairs_in_step: int,
        learning_rate: float,
        stop_requested: StopRequested = never,
    ) -> StepOutcome:
        """Make one optimizer step; a non-finite loss or gradient leaves weights and optimizer state unchanged."""
        return make_step(
            self._parameters,
            self._update,
            self._infer.executor,
            micro_batches,
            objective,
            self.dp_group,
            num_pairs_in_step=num_pairs_in_step,
            learning_rate=learning_rate,
            max_grad_norm=self._max_grad_norm,
            counts_zeros=self._counts_zeros,
            loss_scale=self._loss_scale,
            device=self.device,
            stop_requested=stop_requested,
        )

    def _update(self, learning_rate: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        if self._copies is not None:
            self._copies.hold_changes()
        self._optimizer.step()

    def compile(self, compilation: Compilation) -> None:
        self._infer.compile(compilation)

    def accumulate(
        self, micro_batches: Sequence[MicroBatch], objective: Objective, num_pairs_in_step: int
    ) -> LocalStepResult:
        """Add this rank's term of the step's gradient, times the loss scale, to the parameters; not yet reduced."""
        return accumulate_gradients(
            self._infer.executor, micro_batches, objective, num_pairs_in_step, self.dp_group, self.loss_scale
        )

    def score(self, batch: PairBatch, *, statistics: TokenStatistics = NO_STATISTICS) -> ChosenRejectedLogps:
        return self._infer.score(batch, statistics=statistics)

    def score_base(self, batch: PairBatch) -> ChosenRejectedLogps:
        with adapter_disabled(self.model):
            return self._infer.score(batch)

    def check_logps(self, batch: PairBatch) -> None:
        self._infer.check_logps(batch)

    def weights(self) -> Mapping[str, Tensor]:
        return {name: p.detach() for p, name in self._parameters.names.items()}

    @property
    def loss_scale(self) -> float | None:
        return None if self._loss_scale is None else self._loss_scale.value

    @property
    def device(self) -> torch.device:
        return self._pair_model.device

    @property
    def hidden_size(self) -> int:
        return self._pair_model.hidden_size

    def snapshot(self, extra: Mapping[str, Mapping[str, Tensor]], copies: HostBuffers | None = None) -> Write:
        self._copies = copies
        return self._checkpoint.snapshot(extra, copies)

    def weight_files(self, extra: Mapping[str, Mapping[str, Tensor]]) -> Write:
        return self._checkpoint.weight_files(extra)

    def load(self, directory: Path) -> None:
        self._checkpoint.load(directory)
