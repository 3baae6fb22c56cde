"""Micro-batch executor of Megatron-Core: its schedules run the stages, and the objective runs in the last stage.

Without a pipeline one micro-batch after another; 1F1B if a stage has one chunk of the model, interleaved 1F1B if it has
several. Every stage collates the same micro-batches, so only hidden states and their gradients are sent, unpadded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn

from thresher.data.example import ExampleBatch
from thresher.distributed.groups import Metrics
from thresher.engines.accumulate import LossFn, TokenCounts
from thresher.engines.megatron.model import MegatronPairModel
from thresher.engines.native.sequential import (
    broadcast_scored,
    collate_step,
    count_step_tokens,
    distance_to_single_pairs,
    empty_like,
    loss_of_batch,
)
from thresher.losses.pairs import NO_STATISTICS, ExampleLogps, TokenStatistics
from thresher.models.forward_check import TOLERANCES, LayoutError
from thresher.models.layouts import Layout, ModelInputs, PaddedLayout
from thresher.models.lm_head import ScoredTokens, split_sides

# scored tokens of a micro-batch by its index -> loss, and data to collect
_Loss = Callable[[int, ScoredTokens], tuple[Tensor, Any]]


@dataclass(frozen=True)
class ScheduleExecutor:
    """Runs the micro-batches of a step through the chunks of this process; the output of a dummy batch is discarded."""

    chunks: Sequence[MegatronPairModel]
    # the same chunks as Megatron-Core's schedules see them, with gradient buffers if they are trained
    wrapped: Sequence[nn.Module]
    layout: Layout

    @torch.no_grad()
    def score(self, batch: ExampleBatch, *, statistics: TokenStatistics = NO_STATISTICS) -> ExampleLogps:
        """Score a micro-batch with the forward of training; the last stage broadcasts the logps to all."""
        inputs = self._collate([batch])
        collected = self._run_schedule(
            inputs, statistics, lambda _, scored: (scored.logps.sum(), scored), forward_only=True
        )
        pp, device = self.chunks[0].groups.pp, self.chunks[0].device
        scored = broadcast_scored(collected[0] if collected else None, inputs[0], statistics, pp, torch.float32, device)
        sides = split_sides(inputs[0], scored, device)
        return sides if len(batch) else empty_like(sides)

    def backward(
        self,
        batches: Sequence[ExampleBatch],
        loss_fn: LossFn,
        *,
        statistics: TokenStatistics,
        loss_scale: float | None = None,  # noqa: ARG002  # of the protocol
    ) -> tuple[TokenCounts, Metrics]:
        """Run the schedule; no stage adds a term to the loss."""
        if not batches:
            return TokenCounts(), {}
        inputs = self._collate(batches)

        def loss(index: int, scored: ScoredTokens) -> tuple[Tensor, Any]:
            sides = split_sides(inputs[index], scored, self.chunks[0].device)
            return loss_of_batch(index, sides, batches, loss_fn), None

        self._run_schedule(inputs, statistics, loss, forward_only=False)
        is_last = self.chunks[0].groups.is_last_stage
        tokens = count_step_tokens(inputs, batches) if is_last else TokenCounts()
        return tokens, {}

    @torch.no_grad()
    def check_logps(self, batch: ExampleBatch) -> None:
        """Compare the logps with plain causal attention over one pair at a time.

        No process has the model of transformers, whose forward other engines compare with. Context parallelism does not
        shard padded rows, so its all-to-all is checked too.
        """
        padded = PaddedLayout(pad_id=0, scored=self.layout.scored)
        distance = distance_to_single_pairs(self.score(batch), replace(self, layout=padded), batch)
        if not distance <= TOLERANCES[self.chunks[0].config.params_dtype]:
            has_cp = self.chunks[0].groups.context_parallel is not None  # which the padded layout does not allow
            hint = "remove context_parallel_size and use layout=padded" if has_cp else "use layout=padded"
            raise LayoutError(
                f"log-probabilities of layout `{self.layout.name}` and of single padded pairs differ by "
                f"{distance:.2g} nats per token under Megatron-Core; {hint}"
            )

    def _collate(self, batches: Sequence[ExampleBatch]) -> list[ModelInputs]:
        # the interleaved schedule needs a multiple of the stages
        multiple = self.chunks[0].groups.pp.size if len(self.chunks) > 1 else 1
        return collate_step(self.layout, batches, len(batches) + -len(batches) % multiple)

    def _run_schedule(
        self, inputs: Sequence[ModelInputs], statistics: TokenStatistics, loss: _Loss, *, forward_only: bool
    ) -> list[Any]:
        """Run all micro-batches; return what the loss collects, in the last stage."""
        groups = self.chunks[0].groups

        def forward_step(indices: Iterator[int], chunk: nn.Module) -> tuple[Any, Callable[[ScoredTokens], Any]]:
            index = next(indices)

            def megatron_loss(scored: ScoredTokens) -> tuple[Tensor, Tensor, Any]:
                value, collected = loss(index, scored)
                # the loss is already divided by the pairs of the step; Megatron-Core would divide by this count
                return value, torch.zeros((), dtype=torch.int), collected

            return chunk(inputs[index], statistics=statistics), megatron_loss

        schedule = get_forward_backward_func(groups.pp.size, len(self.chunks) if len(self.chunks) > 1 else None)
        collected: list[Any] = schedule(
            forward_step_func=forward_step,
            data_iterator=[iter(range(len(inputs))) for _ in self.wrapped],
            model=list(self.wrapped),
            num_microbatches=len(inputs),
            # stages send each other the shape of every micro-batch
            seq_length=1,
            micro_batch_size=1,
            forward_only=forward_only,
        )
        return collected
