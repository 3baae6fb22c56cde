"""Training with DeepSpeed: ZeRO stages 0 to 3 with the semantics of a step that every engine has.

DeepSpeed partitions parameters, gradients and optimizer state, and moves them between devices. Forward, loss and
metrics are those of every engine, the optimizer is torch's AdamW, and the decision to skip a step is made before
DeepSpeed's step begins (see optimizer.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thresher.checkpoint.background import HostBuffers
from thresher.checkpoint.save import Write
from thresher.data.pair import PairBatch
from thresher.distributed.groups import DataParallelGroup
from thresher.losses.objective import Objective
from thresher.losses.pairs import NO_STATISTICS, ChosenRejectedLogps, TokenStatistics
from thresher.models.layouts import Layout
from thresher.models.loading.adapters import adapter_disabled
from thresher.strategies.deepspeed.checkpoint import PartitionedCheckpoint
from thresher.strategies.deepspeed.infer import PartitionedScorer
from thresher.strategies.deepspeed.loading import LoadedModel
from thresher.strategies.deepspeed.optimizer import PartitionedAdamW
from thresher.strategies.deepspeed.parameters import PartitionedParameters
from thresher.strategies.deepspeed.partitions import find_partitions
from thresher.strategies.loss_scale import LossScale
from thresher.strategies.native.router_loss import RouterLoss
from thresher.strategies.native.sequential import SequentialExecutor
from thresher.strategies.optimizer import OptimizerSettings
from thresher.strategies.step import make_step
from thresher.strategies.strategy import MicroBatch, StepOutcome, StopRequested, never


class DeepSpeedTrain:
    """A policy in training, partitioned by a ZeRO stage over all data-parallel ranks."""

    def __init__(
        self,
        model: LoadedModel,
        engine: Any,
        optimizer: PartitionedAdamW,
        stage: int,
        layout: Layout,
        compute_dtype: torch.dtype,
        settings: OptimizerSettings,
        dp_group: DataParallelGroup,
        *,
        router_loss_coef: float,
    ):
        """router_loss_coef: weight of the load-balancing loss of a mixture-of-experts model; 0 leaves it out."""
        self.model = model.causal_lm
        self.parameter_counts = model.counts
        self.dp_group = dp_group
        self._engine, self._settings = engine, settings
        self._scorer = PartitionedScorer(model, engine, layout, compute_dtype, is_partitioned=stage == 3)
        pair_model = self._scorer.pair_model
        base: Any = pair_model.base_model
        router_loss = RouterLoss(router_loss_coef, int(base.num_experts), dp_group) if router_loss_coef else None
        self._executor = SequentialExecutor(pair_model, layout, router_loss, self._run_backward)
        is_fp16 = compute_dtype == torch.float16
        self._loss_scale = LossScale(settings.initial_loss_scale, settings.loss_scale_window) if is_fp16 else None
        trained = model.trained
        self.partitions = find_partitions(stage, engine.optimizer, trained, model.shapes)
        self._parameters = PartitionedParameters(engine, optimizer, self.partitions, dp_group, stage)
        self._checkpoint = PartitionedCheckpoint(
            engine, optimizer, trained, model.shapes, self.partitions, dp_group, stage, self._loss_scale
        )
        self._optimizer = optimizer
        self.model.train()

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
            self._parameters.update,
            self._executor,
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

    def _run_backward(self, loss: Tensor, is_last: bool) -> None:
        self._engine.set_gradient_accumulation_boundary(is_last)
        self._engine.backward(loss, scale_wrt_gas=False)

    def score(self, batch: PairBatch, *, statistics: TokenStatistics = NO_STATISTICS) -> ChosenRejectedLogps:
        return self._scorer.score(batch, statistics=statistics)

    def score_base(self, batch: PairBatch) -> ChosenRejectedLogps:
        with adapter_disabled(self.model):
            return self._scorer.score(batch)

    def check_logps(self, batch: PairBatch) -> None:
        self._scorer.check_logps(batch)

    def weights(self) -> Mapping[str, Tensor]:
        """This rank's part of each trained parameter, flattened; a rank may have no part of some."""
        return {each.name: each.weight for each in self.partitions}

    @property
    def loss_scale(self) -> float | None:
        return None if self._loss_scale is None else self._loss_scale.value

    @property
    def device(self) -> torch.device:
        return self._scorer.pair_model.device

    @property
    def hidden_size(self) -> int:
        return self._scorer.pair_model.hidden_size

    def snapshot(self, extra: Mapping[str, Mapping[str, Tensor]], copies: HostBuffers | None = None) -> Write:
        return self._checkpoint.snapshot(extra, copies)

    def weight_files(self, extra: Mapping[str, Mapping[str, Tensor]]) -> Write:
        return self._checkpoint.weight_files(extra)

    def load(self, directory: Path) -> None:
        self._checkpoint.load(directory)
