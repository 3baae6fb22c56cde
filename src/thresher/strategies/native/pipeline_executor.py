"""Pipeline micro-batch executor: torch's schedules run the stages, and the objective runs in the last stage.

1F1B if a stage has one chunk of the model, interleaved 1F1B if it has several. Every stage collates the same
micro-batches, so only hidden states and their gradients are sent, unpadded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

from thresher.data.pair import PairBatch
from thresher.errors import UserError
from thresher.losses.pairs import NO_STATISTICS, ChosenRejectedLogps, TokenStatistics
from thresher.models.layouts import Layout, ModelInputs
from thresher.models.logps import PairModel
from thresher.models.pipeline_chunk import Chunk
from thresher.models.scored_rows import ScoredTokens
from thresher.strategies.accumulate import ExecutedBatches, LossFn
from thresher.strategies.native.fsdp import GradientSync
from thresher.strategies.native.pipeline_parallel import PipelineStageInfo
from thresher.strategies.native.sequential import DUMMY_BATCH, count_step_tokens, empty_like, loss_of_batch
from thresher.strategies.strategy import TokenCounts

TorchLoss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class PipelineExecutor:
    """Runs the micro-batches of a step through the stages; the output of a dummy batch is discarded."""

    model: PairModel
    layout: Layout
    stage: PipelineStageInfo
    gradient_sync: GradientSync | None = None

    @torch.no_grad()
    def score(self, batch: PairBatch, *, statistics: TokenStatistics = NO_STATISTICS) -> ChosenRejectedLogps:
        """Score a micro-batch with the forward of training, bitwise; the last stage broadcasts the logps to all."""
        self._check_repeatable()
        run = self._collate([batch], statistics)
        self._run_schedule(run, None)
        sides = self.model.split_sides(run.inputs[0], self._broadcast(run, index=0))
        return sides if len(batch) else empty_like(sides)

    def backward(
        self,
        batches: Sequence[PairBatch],
        loss_fn: LossFn,
        *,
        statistics: TokenStatistics,
        loss_scale: float | None = None,  # noqa: ARG002  # of the protocol
    ) -> ExecutedBatches:
        """Run the schedule; no stage adds a term of its own to the loss."""
        if not batches:
            return ExecutedBatches(TokenCounts())
        run = self._collate(batches, statistics)

        def loss(logps: Tensor, target: Tensor) -> Tensor:
            index = int(target)
            sides = self.model.split_sides(run.inputs[index], run.scored[index]._replace(logps=logps))
            return loss_of_batch(index, sides, batches, loss_fn)

        with self.model.trained_weights_cast_once():
            self._run_schedule(run, loss)
        return ExecutedBatches(count_step_tokens(run.inputs, batches) if self.stage.is_last else TokenCounts())

    def _check_repeatable(self) -> None:
        """Reject dropout: only losses that couple pairs score in training mode, twice with the same masks."""
        model = self.model.causal_lm
        if model.training and any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules()):
            raise UserError(
                "a loss that couples all pairs of a step scores them twice, and pipeline stages cannot repeat the "
                "dropout masks; set lora_dropout to 0 or pp_size to 1"
            )

    def _collate(self, batches: Sequence[PairBatch], statistics: TokenStatistics) -> _StepRun:
        missing = self._num_scheduled(len(batches)) - len(batches)
        padded = [batch if len(batch) else DUMMY_BATCH for batch in batches] + [DUMMY_BATCH] * missing
        return _StepRun(self.model, [self.layout.collate(batch) for batch in padded], statistics)

    def _num_scheduled(self, count: int) -> int:
        """The smallest number of micro-batches >= `count` that torch's schedules accept."""
        size = self.stage.pipeline.size
        if len(self.stage.chunks) == 1:
            return max(count, size)
        while count % max(1, count // size):
            count += 1
        return count

    def _run_schedule(self, run: _StepRun, loss: TorchLoss | None) -> None:
        stages = [
            _RaggedStage(_ChunkModule(run, chunk), run, chunk, self.stage, self.gradient_sync)
            for chunk in self.stage.chunks
        ]
        # built per call: a schedule has a fixed number of micro-batches, and building it is cheap
        num_batches = len(run.inputs)
        schedule = (
            Schedule1F1B(stages[0], num_batches, loss, scale_grads=False)
            if len(stages) == 1
            else ScheduleInterleaved1F1B(list(stages), num_batches, loss, scale_grads=False)
        )
        indices = torch.arange(num_batches)
        schedule.step(batch_index=indices, target=indices, return_outputs=False)

    def _broadcast(self, run: _StepRun, index: int) -> ScoredTokens:
        """Broadcast the logps of a micro-batch from the last stage."""
        inputs = run.inputs[index]
        wide = torch.promote_types(self.model.stored_dtype, torch.float32)
        scored = torch.empty(1 + sum(run.statistics), len(inputs.targets), dtype=wide, device=self.model.device)
        if self.stage.is_last:
            scored.copy_(run.scored[index].stack())
        self.stage.broadcast_from_last(scored)
        return ScoredTokens.unstack(scored, run.statistics)


@dataclass(frozen=True)
class _StepRun:
    """The micro-batches of one run of the schedule, and the outputs of the last stage by index."""

    model: PairModel
    inputs: list[ModelInputs]
    statistics: TokenStatistics
    scored: dict[int, ScoredTokens] = field(default_factory=dict)


class _ChunkModule(nn.Module):
    """A chunk as a torch module: takes hidden states and the index of a micro-batch, returns hidden states or logps."""

    def __init__(self, run: _StepRun, chunk: Chunk):
        super().__init__()
        self._run = run
        self._chunk = chunk

    def forward(self, hidden: Tensor | None = None, *, batch_index: Tensor) -> Tensor:
        index, run = int(batch_index), self._run
        out = run.model.compute_chunk(self._chunk, run.inputs[index], hidden, run.statistics)
        if isinstance(out, Tensor):
            return out
        # detached: the schedule passes the logps with their graph to the loss
        run.scored[index] = out._replace(logps=out.logps.detach())
        return out.logps


class _RaggedStage(PipelineStage):
    """A stage whose micro-batches differ in shape; torch's PipelineStage expects one shape for all.

    Receive buffers are allocated per micro-batch and freed after its backward, so a stage holds only the hidden states
    of micro-batches in flight.
    """

    def __init__(
        self, module: nn.Module, run: _StepRun, chunk: Chunk, stage: PipelineStageInfo, sync: GradientSync | None
    ):
        model, self._gradient_sync = run.model, sync
        self._shapes = [model.hidden_shape(inputs) for inputs in run.inputs]
        self._dtype = model.stored_dtype
        # declares one tensor that requires a gradient; its shape is not used
        example = torch.empty(1, 0, 1, dtype=self._dtype, device="meta", requires_grad=True)
        super().__init__(
            module,
            chunk.index,
            stage.num_chunks,
            model.device,
            input_args=() if chunk.is_first else (example,),
            output_args=(example,),
            group=stage.pipeline.group,
        )
        self._runtime_validate = False  # it would check every shape against the example

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[Any]:
        self._allocate_recv_buffers(self.args_recv_info[fwd_chunk_id], fwd_chunk_id)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[Any]:
        self._allocate_recv_buffers(self.grad_recv_info.get(bwd_chunk_id, ()), bwd_chunk_id)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        if self._gradient_sync is not None:  # torch asks for an FSDPModule, which a chunk is not
            self._gradient_sync.before_backward(is_last=last_backward)
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        for info in (*self.args_recv_info[bwd_chunk_id], *self.grad_recv_info.get(bwd_chunk_id, ())):
            info.buffer = None

    def _allocate_recv_buffers(self, infos: Sequence[Any], index: int) -> None:
        for info in infos:
            if not info.is_root_arg:
                info.buffer = torch.empty(self._shapes[index], dtype=self._dtype, device=self.device)
