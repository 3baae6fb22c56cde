"""The native engine without gradients: scores pairs for evaluation and as a reference."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from thresher.data.pair import PairBatch
from thresher.losses.pairs import ChosenRejectedLogps
from thresher.models.forward_check import check_against_own_forward
from thresher.models.layouts import Layout
from thresher.models.logps import PairModel
from thresher.strategies.accumulate import Passes
from thresher.strategies.native.parallelize import Placement
from thresher.strategies.native.pipeline_check import check_stages
from thresher.strategies.native.pipeline_executor import PipelinePasses
from thresher.strategies.native.sequential import OneByOne


class NativeInfer:
    """A model that only scores."""

    def __init__(
        self,
        model: nn.Module,
        layout: Layout,
        compute_dtype: torch.dtype,
        placement: Placement = Placement(),  # noqa: B008  # frozen
    ):
        self.model = model
        self.ranks = placement.ranks
        self._layout = layout
        self.pair_model = PairModel.for_layout(model, compute_dtype, layout, placement.row_share)
        stage = placement.stage
        self.passes: Passes = (
            OneByOne(self.pair_model, layout) if stage is None else PipelinePasses(self.pair_model, layout, stage)
        )

    @torch.no_grad()
    def score(self, batch: PairBatch, *, with_log_collision: bool = False) -> ChosenRejectedLogps:
        """Score a micro-batch in evaluation mode and leave the model's mode as it was."""
        was_training = self.model.training
        self.model.eval()
        try:
            return self.passes.score(batch, with_log_collision=with_log_collision).detach()
        finally:
            self.model.train(was_training)

    def check_logps(self, batch: PairBatch) -> None:
        """Compare our logps with those of the model's own forward; stop the run when they part."""
        if isinstance(self.passes, PipelinePasses):
            check_stages(self.passes, batch)
        else:
            check_against_own_forward(self.pair_model, self._layout, batch)

    def weights(self) -> Mapping[str, Tensor]:
        return {name: p.detach() for name, p in self.model.named_parameters()}

    @torch.no_grad()
    def pull_towards(self, weights: Mapping[str, Tensor], alpha: float) -> None:
        """TR-DPO: move to alpha * weights + (1 - alpha) * own."""
        for name, own in self.model.named_parameters():
            own.lerp_(weights[name].to(own), alpha)
