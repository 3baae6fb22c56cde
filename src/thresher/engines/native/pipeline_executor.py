"""Pipeline micro-batch executor: torch's schedules run the stages, and the objective runs in the last stage.

1F1B if a stage has one chunk of the model, interleaved 1F1B if it has several, or the zero-bubble schedule of either.
Every stage collates the same micro-batches, so only hidden states and their gradients are sent, unpadded.

The start-up check compares the logps with the model's original layers on real pairs. No process has the full model, so
each stage runs its original layers, one pair at a time, and the last stage computes the logits with the original head.
That the model accepts hidden states is checked by models/pipeline_chunk.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from thresher.data.example import ExampleBatch
from thresher.distributed.groups import Metrics
from thresher.distributed.replicas import ReplicaSums
from thresher.engines.accumulate import LossFn, TokenCounts
from thresher.engines.native.declaration import FSDP2Settings
from thresher.engines.native.fsdp import GradientSync
from thresher.engines.native.parallelize import PipelineStageInfo
from thresher.engines.native.sequential import (
    balanced,
    broadcast_scored,
    collate_step,
    count_step_tokens,
    distance_to_single_pairs,
    empty_like,
    loss_of_batch,
)
from thresher.errors import UserError
from thresher.losses.pairs import NO_STATISTICS, ExampleLogps, TokenStatistics
from thresher.models.forward_check import (
    TOLERANCES,
    LayoutError,
    computing_in_storage_precision,
    eval_mode,
    family_of,
    in_storage_precision,
    without_pad_token,
)
from thresher.models.layouts import Layout, ModelInputs, PaddedLayout
from thresher.models.lm_head import ScoredTokens
from thresher.models.logps import PairModel, original_forward
from thresher.models.optimizations.compile import uncompiled_layers
from thresher.models.pipeline_chunk import Chunk


@dataclass(frozen=True)
class PipelineExecutor:
    """Runs the micro-batches of a step through the stages; the output of a dummy batch is discarded."""

    model: PairModel
    layout: Layout
    stage: PipelineStageInfo
    gradient_sync: GradientSync | ReplicaSums | None = None
    settings: FSDP2Settings = field(default_factory=FSDP2Settings)
    _schedules: dict[tuple[int, bool], _KeptSchedule] = field(init=False, default_factory=dict, repr=False)

    @torch.no_grad()
    def score(self, batch: ExampleBatch, *, statistics: TokenStatistics = NO_STATISTICS) -> ExampleLogps:
        """Score a micro-batch with the forward of training, bitwise; the last stage broadcasts the logps to all."""
        run = self._collate([batch], statistics)
        self._run_schedule(run)
        wide = torch.promote_types(self.model.stored_dtype, torch.float32)
        scored = broadcast_scored(
            run.scored.get(0), run.inputs[0], statistics, self.stage.pipeline, wide, self.model.device
        )
        sides = self.model.split_sides(run.inputs[0], scored)
        return sides if len(batch) else empty_like(sides)

    def backward(
        self,
        batches: Sequence[ExampleBatch],
        loss_fn: LossFn,
        *,
        statistics: TokenStatistics,
        loss_scale: float | None = None,
    ) -> tuple[TokenCounts, Metrics]:
        """Run the schedule."""
        run = self._collate(batches, statistics, loss_fn)

        def measure() -> None:
            if batches:
                self._run_schedule(replace(run, loss_fn=None, scored={}))

        with balanced(self.model, measure, loss_scale) as metrics, self.model.trained_weights_cast_once():
            if batches:
                self._run_schedule(run)
        tokens = count_step_tokens(run.inputs, batches) if self.stage.is_last else TokenCounts()
        return tokens, metrics

    @torch.no_grad()
    def check_logps(self, batch: ExampleBatch) -> None:
        """Raise UserError on every stage if the logps differ from the original layers."""
        model = in_storage_precision(self.model)
        original = _OriginalForwardModel(model.causal_lm, model.compute_dtype)
        padded = PaddedLayout(pad_id=0, scored=self.layout.scored)
        with eval_mode(model.causal_lm), uncompiled_layers(model.causal_lm), computing_in_storage_precision(model):
            # without settings: hidden states are sent as they are stored
            ours = replace(self, model=model, settings=FSDP2Settings()).score(batch)
            with original_forward(model.causal_lm):
                one_by_one = replace(self, model=original, layout=padded, settings=FSDP2Settings())
                distance = distance_to_single_pairs(ours, one_by_one, batch)
        if not distance <= TOLERANCES[model.compute_dtype]:
            is_packed = self.layout.needs_pair_attention
            error, hint = (LayoutError, "use layout=padded") if is_packed else (UserError, "set pp_size to 1")
            raise error(
                f"log-probabilities of layout `{self.layout.name}` and of the model's original layers differ by "
                f"{distance:.2g} nats per token (architecture `{family_of(model)}`, pp_size "
                f"{self.stage.pipeline.size}); {hint}"
            )

    @property
    def sent_dtype(self) -> torch.dtype:
        """Precision of hidden states between stages, and of their gradients."""
        return torch.bfloat16 if self.settings.pp_dtype == "bf16" else self.model.stored_dtype

    def _collate(
        self, batches: Sequence[ExampleBatch], statistics: TokenStatistics, loss_fn: LossFn | None = None
    ) -> _StepRun:
        inputs = collate_step(self.layout, batches, self._num_scheduled(len(batches)))
        return _StepRun(self.model, inputs, statistics, batches, loss_fn)

    def _num_scheduled(self, count: int) -> int:
        """The smallest number of micro-batches >= `count` that torch's schedules accept."""
        size = self.stage.pipeline.size
        if len(self.stage.chunks) == 1:
            count = max(count, size)
            if self.settings.pp_schedule == "1f1b":
                return count
        while count % max(1, count // size):
            count += 1
        return count

    def _run_schedule(self, run: _StepRun) -> None:
        # kept: a schedule has a fixed number of micro-batches, and its stages exchange a message before its first run
        key = (len(run.inputs), run.loss_fn is not None)
        if key not in self._schedules:
            self._schedules[key] = _KeptSchedule(self, run)
        self._schedules[key].run(run)


class _OriginalForwardModel(PairModel):
    """Scores the last chunk with the original forward of the causal LM."""

    def _compute_chunk(
        self, chunk: Chunk, batch: ModelInputs, entering: Tensor | None, statistics: TokenStatistics
    ) -> Tensor | ScoredTokens:
        if not chunk.is_last:
            return super()._compute_chunk(chunk, batch, entering, statistics)
        inputs = {name: tensor.to(self.device) for name, tensor in batch.model_inputs.items() if name != "input_ids"}
        model: Any = self.base_model
        width = batch.model_inputs["input_ids"].shape[1]
        if self.is_reward_model:
            rewards = []
            with chunk.activate(self.backbone), self.precision(self.device), without_pad_token(model.config):
                for row, last in (divmod(each, width) for each in batch.scored_rows.tolist()):
                    # alone and without padding, which the model would look for in the tokens
                    alone = {name: each[row : row + 1, : last + 1] for name, each in inputs.items()}
                    embeds = None if entering is None else entering[row : row + 1, : last + 1]
                    rewards.append(model.original_forward(inputs_embeds=embeds, **alone, use_cache=False).logits[0])
            return ScoredTokens(torch.cat(rewards).float())
        columns, column_index = (batch.scored_rows % width).unique(return_inverse=True)
        with chunk.activate(self.backbone), self.precision(self.device):
            logits: Tensor = model.original_forward(
                inputs_embeds=entering, **inputs, logits_to_keep=columns.to(self.device), use_cache=False
            ).logits
        if logits.shape[1] != len(columns):  # the architecture ignores logits_to_keep
            logits = logits[:, columns]
        rows = logits[batch.scored_rows // width, column_index].float()
        return ScoredTokens(rows.log_softmax(-1).gather(1, batch.targets.to(rows.device)[:, None]).squeeze(1))


@dataclass(frozen=True)
class _StepRun:
    """The micro-batches of one run of the schedule, and the outputs of the last stage by index."""

    model: PairModel
    inputs: list[ModelInputs]
    statistics: TokenStatistics
    batches: Sequence[ExampleBatch]
    # None to score without gradient
    loss_fn: LossFn | None
    scored: dict[int, ScoredTokens] = field(default_factory=dict)


class _KeptSchedule:
    """A schedule of torch for a number of micro-batches. step: the run that it is in, or the last one."""

    def __init__(self, executor: PipelineExecutor, step: _StepRun):
        self.step = step
        count = len(step.inputs)
        self._indices = torch.arange(count)
        self._stages = [
            _RaggedStage(_ChunkModule(self, executor, chunk), executor, chunk, self) for chunk in executor.stage.chunks
        ]
        loss, stages = (None if step.loss_fn is None else self._loss), list[Any](self._stages)
        self._schedule: Any
        if executor.settings.pp_schedule == "zero_bubble" and loss is not None:
            self._schedule = ScheduleInterleavedZeroBubble(stages, count, loss, scale_grads=False)
        elif len(stages) == 1:
            self._schedule = Schedule1F1B(stages[0], count, loss, scale_grads=False)
        else:
            self._schedule = ScheduleInterleaved1F1B(stages, count, loss, scale_grads=False)

    def run(self, step: _StepRun) -> None:
        self.step = step
        self._schedule.step(batch_index=self._indices, target=self._indices, return_outputs=False)
        for stage in self._stages:
            stage.release()

    def _loss(self, logps: Tensor, target: Tensor) -> Tensor:
        step, index = self.step, int(target)
        assert step.loss_fn is not None  # noqa: S101
        sides = step.model.split_sides(step.inputs[index], step.scored[index]._replace(logps=logps))
        return loss_of_batch(index, sides, step.batches, step.loss_fn)


class _ChunkModule(nn.Module):
    """A chunk as a torch module: takes hidden states and the index of a micro-batch, returns hidden states or logps."""

    def __init__(self, schedule: _KeptSchedule, executor: PipelineExecutor, chunk: Chunk):
        super().__init__()
        self._schedule, self._chunk, self._executor = schedule, chunk, executor

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:  # noqa: ARG002  # of the base class
        """All trained ones of the process: the zero-bubble schedule separates their gradients from hidden states'."""
        return (p for p in self._executor.model.causal_lm.parameters() if p.requires_grad)

    def forward(self, hidden: Tensor | None = None, *, batch_index: Tensor) -> Tensor:
        index, run = int(batch_index), self._schedule.step
        entering = None if hidden is None else hidden.to(run.model.stored_dtype)
        out = run.model.compute_chunk(self._chunk, run.inputs[index], entering, run.statistics)
        if isinstance(out, Tensor):
            return out.to(self._executor.sent_dtype)
        # detached: the schedule passes the logps with their graph to the loss
        run.scored[index] = out._replace(logps=out.logps.detach())
        return out.logps


class _RaggedStage(PipelineStage):
    """A stage whose micro-batches differ in shape; torch's PipelineStage expects one shape for all.

    Receive buffers are allocated per micro-batch and freed after its backward, so a stage holds only the hidden states
    of micro-batches in flight.
    """

    def __init__(self, module: nn.Module, executor: PipelineExecutor, chunk: Chunk, schedule: _KeptSchedule):
        model, stage = executor.model, executor.stage
        self._schedule, self._gradient_sync = schedule, executor.gradient_sync
        self._dtype = executor.sent_dtype
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
        # the head computes both of its gradients at once, so the last chunk would run its backward twice
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward or self.is_last, last_backward)
        self._free_recv_buffers(bwd_chunk_id)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        if not self.is_last:
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)

    def release(self) -> None:
        """Free what a run has left: outputs with their graphs, and received hidden states that had no backward."""
        self.clear_runtime_states()
        for index in self.args_recv_info:
            self._free_recv_buffers(index)

    def _free_recv_buffers(self, index: int) -> None:
        for info in (*self.args_recv_info[index], *self.grad_recv_info.get(index, ())):
            info.buffer = None

    def _allocate_recv_buffers(self, infos: Sequence[Any], index: int) -> None:
        run = self._schedule.step
        for info in infos:
            if not info.is_root_arg:
                like = torch.empty(run.model.hidden_shape(run.inputs[index]), dtype=self._dtype, device="meta")
                info.tensor_meta = replace(info.tensor_meta, shape=like.shape, stride=like.stride())
                if not hasattr(info, "allocate_buffer"):  # torch 2.15 allocates it from the metadata, and owns it
                    info.buffer = torch.empty_like(like, device=self.device)
