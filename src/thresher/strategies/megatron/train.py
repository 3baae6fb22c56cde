"""Training with Megatron-Core: its schedules, gradient buffers and optimizer under the step of all engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from thresher.checkpoint.background import HostBuffers
from thresher.checkpoint.save import Write
from thresher.data.pair import PairBatch
from thresher.losses.objective import Objective
from thresher.losses.pairs import NO_STATISTICS, ChosenRejectedLogps, TokenStatistics
from thresher.models.layouts import Layout
from thresher.strategies.loss_scale import LossScale
from thresher.strategies.megatron.checkpoint import MegatronCheckpoint, NamedState
from thresher.strategies.megatron.infer import MegatronInfer
from thresher.strategies.megatron.lora import ChunkAdapters
from thresher.strategies.megatron.model import MegatronPairModel
from thresher.strategies.megatron.optimizer import PolicyOptimizer
from thresher.strategies.optimizer import OptimizerSettings
from thresher.strategies.step import make_step
from thresher.strategies.strategy import MicroBatch, ParameterCounts, StepOutcome, StopRequested, never


class MegatronTrain:
    """A policy in training, or this process's part of it."""

    def __init__(
        self,
        chunks: Sequence[MegatronPairModel],
        optimizer: PolicyOptimizer,
        settings: OptimizerSettings,
        states: Sequence[NamedState],
        layout: Layout,
        parameter_counts: ParameterCounts,
        adapters: Sequence[ChunkAdapters] = (),
    ):
        """parameter_counts: of the whole model. adapters: of each chunk; empty if all weights are trained."""
        self.parameter_counts = parameter_counts
        self._infer = MegatronInfer(chunks, layout, optimizer.chunks)
        # a rank that reduces its gradients in a backward needs one
        overlaps = optimizer.chunks[0].ddp_config.overlap_grad_reduce
        dp_group = self._infer.dp_group
        self.dp_group = replace(dp_group, needs_lockstep=dp_group.needs_lockstep or overlaps)
        self._optimizer, self._settings, self._states, self._adapters = optimizer, settings, states, adapters
        is_fp16 = chunks[0].config.params_dtype == torch.float16
        self._loss_scale = LossScale(settings.initial_loss_scale, settings.loss_scale_window) if is_fp16 else None
        self._checkpoint = MegatronCheckpoint(states, self.dp_group.world, self._loss_scale)

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
            self._optimizer,
            self._optimizer.step,
            self._infer.executor,
            micro_batches,
            objective,
            self.dp_group,
            num_pairs_in_step=num_pairs_in_step,
            learning_rate=learning_rate,
            max_grad_norm=self._settings.max_grad_norm,
            counts_zeros=self._settings.counts_zeros,
            loss_scale=self._loss_scale,
            device=self.device,
            stop_requested=stop_requested,
        )

    def score(self, batch: PairBatch, *, statistics: TokenStatistics = NO_STATISTICS) -> ChosenRejectedLogps:
        return self._infer.score(batch, statistics=statistics)

    def score_base(self, batch: PairBatch) -> ChosenRejectedLogps:
        with ExitStack() as disabled:
            for adapters in self._adapters:
                disabled.enter_context(adapters.disabled())
            return self._infer.score(batch)

    def check_logps(self, batch: PairBatch) -> None:
        self._infer.check_logps(batch)

    def weights(self) -> Mapping[str, Tensor]:
        """This process's slices of the trained weights, by the names of transformers."""
        self._optimizer.finish_gathering()
        return {
            piece.hf_name: piece.values()
            for each in self._states
            for piece in each.pieces(each.state.parameter.detach())
        }

    @property
    def loss_scale(self) -> float | None:
        return None if self._loss_scale is None else self._loss_scale.value

    @property
    def device(self) -> torch.device:
        return self._infer.chunks[0].device

    @property
    def hidden_size(self) -> int:
        return int(self._infer.chunks[0].config.hidden_size)

    def snapshot(self, extra: Mapping[str, Mapping[str, Tensor]], copies: HostBuffers | None = None) -> Write:
        """Capture weights and optimizer state; a reference that follows the policy is rejected by the check."""
        assert not extra  # noqa: S101
        return self._checkpoint.snapshot(copies)

    def weight_files(self, extra: Mapping[str, Mapping[str, Tensor]]) -> Write:
        assert not extra  # noqa: S101
        return self._checkpoint.weight_files()

    def load(self, directory: Path) -> None:
        self._checkpoint.load(directory)
