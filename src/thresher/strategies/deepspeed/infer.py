"""Inference with DeepSpeed: a model partitioned over the workers (ZeRO-3) scores pairs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from thresher.data.pair import PairBatch
from thresher.distributed.groups import DataParallelGroup
from thresher.errors import UserError
from thresher.losses.pairs import NO_STATISTICS, ChosenRejectedLogps, TokenStatistics
from thresher.models.forward_check import check_logps
from thresher.models.layouts import Layout
from thresher.models.logps import PairModel
from thresher.strategies.deepspeed.loading import LoadedModel
from thresher.strategies.native.sequential import SequentialExecutor


class PartitionedScorer:
    """A model inside a DeepSpeed engine, in eval mode while it scores."""

    def __init__(
        self, model: LoadedModel, engine: Any, layout: Layout, compute_dtype: torch.dtype, *, is_partitioned: bool
    ):
        """is_partitioned: parameters are gathered by hooks around the modules that have them (ZeRO-3)."""
        self.model = model.causal_lm
        self._layout = layout
        self.pair_model = PairModel.for_layout(
            self.model, compute_dtype, layout, engine=engine, calls_head=is_partitioned
        )
        self._executor = SequentialExecutor(self.pair_model, layout)

    @torch.no_grad()
    def score(self, batch: PairBatch, *, statistics: TokenStatistics = NO_STATISTICS) -> ChosenRejectedLogps:
        was_training = self.model.training
        self.model.eval()
        try:
            return self._executor.score(batch, statistics=statistics).detach()
        finally:
            self.model.train(was_training)

    def check_logps(self, batch: PairBatch) -> None:
        check_logps(self.pair_model, self._layout, batch)


class DeepSpeedInfer:
    """A frozen model that is partitioned over all workers of its role."""

    def __init__(
        self, model: LoadedModel, engine: Any, layout: Layout, compute_dtype: torch.dtype, dp_group: DataParallelGroup
    ):
        self.model = model.causal_lm
        self.dp_group = dp_group
        self._scorer = PartitionedScorer(model, engine, layout, compute_dtype, is_partitioned=True)

    def score(self, batch: PairBatch, *, statistics: TokenStatistics = NO_STATISTICS) -> ChosenRejectedLogps:
        return self._scorer.score(batch, statistics=statistics)

    def check_logps(self, batch: PairBatch) -> None:
        self._scorer.check_logps(batch)

    def weights(self) -> Mapping[str, Tensor]:
        """This rank's part of each parameter, flattened and padded to equal parts."""
        parameters: Iterable[tuple[str, Any]] = self.model.named_parameters()
        return {name: parameter.ds_tensor for name, parameter in parameters}

    def ema_update(self, weights: Mapping[str, Tensor], alpha: float) -> None:  # noqa: ARG002
        raise UserError("a reference on DeepSpeed cannot follow the policy; remove reference.sync_steps")
