"""How a pipeline goes through micro-batches: torch's schedules drive, and the objective runs in the last stage.

1F1B where a stage has one chunk of the model, interleaved 1F1B where it has several. Every process of a pipeline lays
out the same micro-batches, so that only hidden states and their gradients travel, and each in its own shape.
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
from thresher.losses.pairs import ChosenRejectedLogps
from thresher.models.layouts import Layout, ModelInputs
from thresher.models.logps import PairModel
from thresher.models.pipeline_chunk import Chunk
from thresher.strategies.accumulate import LossFn
from thresher.strategies.native.pipeline_parallel import PipelineStageInfo
from thresher.strategies.native.sequential import DUMMY_BATCH, count_tokens, empty_like
from thresher.strategies.strategy import TokenCounts

TorchLoss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class PipelineExecutor:
    """Micro-batches of a step along the stages of a pipeline; one without pairs is a stand-in that changes nothing."""

    model: PairModel
    layout: Layout
    stage: PipelineStageInfo

    @torch.no_grad()
    def score(self, batch: PairBatch, *, with_squared_probs: bool = False) -> ChosenRejectedLogps:
        """Score a micro-batch as it is trained on, to the bit: it goes from stage to stage, and all get its logps."""
        self._check_repeatable()
        run = self._run([batch], with_squared_probs)
        self._drive(run, None)
        sides = self.model.split_sides(run.arranged[0], *self._broadcast(run, number=0))
        return sides if len(batch) else empty_like(sides)

    def backward(self, batches: Sequence[PairBatch], loss_fn: LossFn, *, with_squared_probs: bool) -> TokenCounts:
        if not batches:
            return TokenCounts()
        run = self._run(batches, with_squared_probs)

        def loss(logps: Tensor, number: Tensor) -> Tensor:
            index = int(number)
            sides = self.model.split_sides(run.arranged[index], logps, run.log_sum_squared_probs.get(index))
            if index >= len(batches):
                return empty_like(sides).chosen.values.sum()
            return loss_fn(index, sides if len(batches[index]) else empty_like(sides))

        self._drive(run, loss)
        tokens = TokenCounts()
        if self.stage.is_last:
            for arranged, batch in zip(run.arranged, batches, strict=False):
                tokens += count_tokens(arranged) if len(batch) else TokenCounts()
        return tokens

    def _check_repeatable(self) -> None:
        """Losses that couple the pairs of a step score them twice, with the same dropout."""
        model = self.model.causal_lm
        if model.training and any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules()):
            raise UserError(
                "this loss couples all pairs of a step, which are scored twice with the same dropout, and the stages "
                "of a pipeline draw it in another order the second time; set lora_dropout to 0 or pp_size to 1"
            )

    def _run(self, batches: Sequence[PairBatch], with_squared_probs: bool) -> _Run:
        missing = self._num_driven(len(batches)) - len(batches)
        pairs = [batch if len(batch) else DUMMY_BATCH for batch in batches] + [DUMMY_BATCH] * missing
        return _Run(self.model, [self.layout.collate(batch) for batch in pairs], with_squared_probs)

    def _num_driven(self, count: int) -> int:
        """The smallest number of micro-batches, not below `count`, that torch's schedules take."""
        size = self.stage.pipeline.size
        if len(self.stage.chunks) == 1:
            return max(count, size)
        while count % max(1, count // size):
            count += 1
        return count

    def _drive(self, run: _Run, loss: TorchLoss | None) -> None:
        stages = [_RaggedStage(_ChunkModule(run, chunk), run, chunk, self.stage) for chunk in self.stage.chunks]
        # a schedule is made for a number of micro-batches, and costs nothing beside them
        num_batches = len(run.arranged)
        schedule = (
            Schedule1F1B(stages[0], num_batches, loss, scale_grads=False)
            if len(stages) == 1
            else ScheduleInterleaved1F1B(list(stages), num_batches, loss, scale_grads=False)
        )
        numbers = torch.arange(num_batches)
        schedule.step(number=numbers, target=numbers, return_outputs=False)

    def _broadcast(self, run: _Run, number: int) -> tuple[Tensor, Tensor | None]:
        """Give all stages what the last has scored of a micro-batch."""
        arranged = run.arranged[number]
        rows = 2 if run.with_squared_probs else 1
        wide = torch.promote_types(self.model.stored_dtype, torch.float32)
        scored = torch.empty(rows, len(arranged.targets), dtype=wide, device=self.model.device)
        if self.stage.is_last:
            scored[0] = run.logps[number]
            if run.with_squared_probs:
                scored[1] = run.log_sum_squared_probs[number]
        self.stage.broadcast_from_last(scored)
        return scored[0], scored[1] if run.with_squared_probs else None


@dataclass(frozen=True)
class _Run:
    """The micro-batches of one drive through the pipeline, and what the last stage makes of them."""

    model: PairModel
    arranged: list[ModelInputs]
    with_squared_probs: bool
    logps: dict[int, Tensor] = field(default_factory=dict)
    log_sum_squared_probs: dict[int, Tensor] = field(default_factory=dict)


class _ChunkModule(nn.Module):
    """A chunk as torch's pipelines call it: hidden states and a micro-batch's number in, hidden states or logps out."""

    def __init__(self, run: _Run, chunk: Chunk):
        super().__init__()
        self._run = run
        self._chunk = chunk

    def forward(self, hidden: Tensor | None = None, *, number: Tensor) -> Tensor:
        index, run = int(number), self._run
        out, collision = run.model.compute_chunk(self._chunk, run.arranged[index], hidden, run.with_squared_probs)
        if self._chunk.is_last and not torch.is_grad_enabled():
            run.logps[index] = out
        if collision is not None:
            run.log_sum_squared_probs[index] = collision
        return out


class _RaggedStage(PipelineStage):
    """A stage that receives every micro-batch in its own shape; torch's own has one shape for all.

    Memory for hidden states is taken when they are about to come and given back after their backward, so that a stage
    holds those of as many micro-batches as are under way.
    """

    def __init__(self, module: nn.Module, run: _Run, chunk: Chunk, stage: PipelineStageInfo):
        model = run.model
        self._shapes = [model.hidden_shape(arranged) for arranged in run.arranged]
        self._dtype = model.stored_dtype
        # says that it is hidden states which travel, and that gradients come back
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
        self._runtime_validate = False  # it would compare all shapes with the example's

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[Any]:
        self._allocate_recv_buffers(self.args_recv_info[fwd_chunk_id], fwd_chunk_id)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[Any]:
        self._allocate_recv_buffers(self.grad_recv_info.get(bwd_chunk_id, ()), bwd_chunk_id)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **rest: Any) -> None:
        super().backward_one_chunk(bwd_chunk_id, *args, **rest)
        for received in (*self.args_recv_info[bwd_chunk_id], *self.grad_recv_info.get(bwd_chunk_id, ())):
            received.buffer = None

    def _allocate_recv_buffers(self, expected: Sequence[Any], number: int) -> None:
        for one in expected:
            if not one.is_root_arg:
                one.buffer = torch.empty(self._shapes[number], dtype=self._dtype, device=self.device)
