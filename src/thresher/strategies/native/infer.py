"""Inference with the native engine: scores pairs for evaluation and for the reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from thresher.data.pair import PairBatch
from thresher.losses.pairs import NO_STATISTICS, ChosenRejectedLogps, TokenStatistics
from thresher.models.forward_check import check_logps
from thresher.models.layouts import Layout
from thresher.models.logps import PairModel
from thresher.models.optimizations.compile import Compilation
from thresher.strategies.native.fsdp import reshard
from thresher.strategies.native.parallelize import ParallelContext
from thresher.strategies.native.router_loss import RouterLoss
from thresher.strategies.native.sequential import SequentialExecutor

if TYPE_CHECKING:
    from thresher.strategies.native.pipeline_executor import PipelineExecutor


class NativeInfer:
    """A model that only scores."""

    def __init__(
        self,
        model: nn.Module,
        layout: Layout,
        compute_dtype: torch.dtype,
        parallel: ParallelContext = ParallelContext(),  # noqa: B008  # frozen
        *,
        router_loss_coef: float = 0.0,
    ):
        """router_loss_coef: weight of the load-balancing loss in a step; 0 leaves it out."""
        self.model = model
        self.dp_group = parallel.dp_group
        self._layout = layout
        self.pair_model = PairModel.for_layout(
            model,
            compute_dtype,
            layout,
            parallel.context_parallel,
            calls_head=parallel.gathers_head,
            device=parallel.device,
            num_row_shards=parallel.num_row_shards,
        )
        self.executor: SequentialExecutor | PipelineExecutor
        if (stage := parallel.stage) is None:
            router_loss = self._router_loss(router_loss_coef)
            self.executor = SequentialExecutor(self.pair_model, layout, router_loss, _backward(parallel))
        else:
            from thresher.strategies.native.pipeline_executor import PipelineExecutor

            self.executor = PipelineExecutor(self.pair_model, layout, stage, parallel.gradient_sync, parallel.pipeline)

    def _router_loss(self, coef: float) -> RouterLoss | None:
        model: Any = self.pair_model.base_model
        return RouterLoss(coef, int(model.num_experts), self.dp_group) if coef else None

    @torch.no_grad()
    def score(self, batch: PairBatch, *, statistics: TokenStatistics = NO_STATISTICS) -> ChosenRejectedLogps:
        """Score a micro-batch in eval mode, then restore the mode of the model."""
        was_training = self.model.training
        self.model.eval()
        try:
            return self.executor.score(batch, statistics=statistics).detach()
        finally:
            self.model.train(was_training)
            reshard(self.model)

    def check_logps(self, batch: PairBatch) -> None:
        """Compare the logps with those of the model's original forward; raise UserError if they differ."""
        if isinstance(self.executor, SequentialExecutor):
            check_logps(self.pair_model, self._layout, batch)
        else:
            from thresher.strategies.native.pipeline_check import check_stages

            check_stages(self.executor, batch)
        reshard(self.model)

    def compile(self, compilation: Compilation) -> None:
        """Compile parts of the model; the first batches are slow."""
        compilation.apply(self.pair_model.backbone)

    def weights(self) -> Mapping[str, Tensor]:
        return {name: p.detach() for name, p in self.model.named_parameters()}

    @torch.no_grad()
    def ema_update(self, weights: Mapping[str, Tensor], alpha: float) -> None:
        """TR-DPO: set the weights to alpha * weights + (1 - alpha) * current."""
        for name, parameter in self.model.named_parameters():
            parameter.lerp_(weights[name].to(parameter), alpha)


def _backward(parallel: ParallelContext) -> Callable[[Tensor, bool], None]:
    sync = parallel.gradient_sync

    def run(loss: Tensor, is_last: bool) -> None:
        if sync is not None:
            sync.before_backward(is_last=is_last)
        loss.backward()

    return run
