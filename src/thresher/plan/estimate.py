"""Apply the formulas to a config: memory and time of the first, a middle and the last pipeline stage."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from transformers.initialization import no_init_weights

from thresher.builders.engines import compilation
from thresher.builders.inputs import DEFAULT_TOKENS_PER_MICRO_BATCH
from thresher.builders.preflight.parts import RunParts
from thresher.builders.reference_mode import reference_has_workers
from thresher.config import DPOConfig
from thresher.config.roles import ModelArgs
from thresher.data.batching.batches import CostModel, MicroBatching
from thresher.data.batching.plan import Plan, make_plan
from thresher.distributed.mesh import ParallelDims
from thresher.errors import UserError
from thresher.models.loading.load import DTYPES
from thresher.models.optimizations.recompute import Recompute
from thresher.plan.activations import MemorySettings
from thresher.plan.compute import (
    Cluster,
    Flops,
    Roofline,
    StepCosts,
    roofline,
    step_flops,
)
from thresher.plan.elementwise import Compiled, elementwise_bytes
from thresher.plan.memory import RESERVED, Memory, peak_memory
from thresher.plan.model import ModelShape, Stage
from thresher.plan.pairs import PairLengths, find_lengths
from thresher.plan.traffic import AXES_OF_MESSAGES, Axis, Precision, TrafficSettings, step_messages, wire_bytes
from thresher.plan.workload import Rows, Step, Workload, dummy_rows, sample_workload
from thresher.strategies.accumulate import empty_metrics
from thresher.strategies.native.build import axis_sizes
from thresher.strategies.native.check import check_axes, why_not_sequence_parallel
from thresher.strategies.native.declaration import FSDP2Settings

_BUDGET_STEP, _LARGEST_BUDGET = 256, 1 << 20


@dataclass(frozen=True)
class StageEstimate:
    """One process of a pipeline stage. wire_bytes: sent per step, by axis. checkpoint: bytes that it writes."""

    name: str
    memory: Memory
    wire_bytes: dict[Axis, float]
    flops: Flops
    roofline: Roofline
    checkpoint: int


class Estimate:
    """A run on some GPUs, by formula. Every figure is computed on first use."""

    def __init__(
        self,
        config: DPOConfig,
        cluster: Cluster,
        like: Estimate | None = None,
        *,
        pairs: PairLengths | None = None,
        budget_reason: str | None = None,
        is_condensed: bool = False,
        note: str | None = None,
    ):
        """like: an estimate of the same data, and of the same model if it is trained alike. pairs: if known already.

        budget_reason: why the token budget was chosen for this run; None if it was not. is_condensed: time from the
        median step alone, for a search. note: how the config differs from what the run does.
        """
        if config.actor_train.strategy_name != "fsdp2_train":
            raise UserError(
                f"the formulas are those of fsdp2_train, and actor_train uses {config.actor_train.strategy_name}"
            )
        self.config, self.cluster, self.budget_reason = config, cluster, budget_reason
        same_model = like is not None and like.config.actor_train.model_args == config.actor_train.model_args
        self._same_model = like if same_model else None
        self.parts: RunParts = RunParts(config) if self._same_model is None else self._same_model.parts
        self.is_condensed, self.note = is_condensed, note
        if like is None or self.settings is not like.settings or cluster != like.cluster:
            self._check()
        self._known_pairs = pairs
        self._same_pairs = like if pairs is None and like is not None and self._reads_pairs_of(like) else None
        self._workloads: dict[tuple[int, int | None, int | None], Workload] = {}
        self._stages: dict[int, Stage] = {}
        if self._same_pairs is not None and self._same_pairs.pairs_per_step == self.pairs_per_step:
            self._workloads = self._same_pairs._workloads
        if self._same_model is not None and self._same_model._axes == self._axes:
            self._stages = self._same_model._stages

    def _reads_pairs_of(self, other: Estimate) -> bool:
        return not other.pairs.is_assumed or other.pairs_per_step == self.pairs_per_step

    @property
    def _axes(self) -> tuple[ParallelDims, int]:
        return self.dims, self.settings.virtual_pp_size

    def _check(self) -> None:
        try:
            self.settings.check_workers(self.cluster.num_gpus)
        except ValueError as error:
            raise UserError(f"actor_train: {error}") from None
        model = self.parts.model_configs[self.parts.policy_path]
        check_axes(self.settings, self.cluster.num_gpus, "actor_train", model, self.parts.layout)

    @property
    def allows_sequence_parallel(self) -> bool:
        model = self.parts.model_configs[self.parts.policy_path]
        return why_not_sequence_parallel(model, self.parts.layout, has_lora=self.config.uses_lora) is None

    @cached_property
    def settings(self) -> FSDP2Settings:
        like, args = self._same_model, self.config.actor_train.strategy_args
        settings: FSDP2Settings = (
            like.settings if like is not None and like.config.actor_train.strategy_args is args else args.settings
        )
        return settings

    @cached_property
    def dims(self) -> ParallelDims:
        return axis_sizes(self.settings, self.cluster.num_gpus)

    @cached_property
    def shape(self) -> ModelShape:
        if self._same_model is not None:
            return self._same_model.shape
        with no_init_weights():  # of tensors on the meta device: takes longer than all formulas
            return ModelShape.of(self.parts.policy)

    @property
    def precision(self) -> Precision:
        return precision_of(self.config.actor_train.model_args, self.settings)

    @property
    def pairs_per_step(self) -> int:
        return self.config.actor_train.training_args.pairs_per_step(self.dims.num_data_ranks)

    @cached_property
    def pairs(self) -> PairLengths:
        if self._known_pairs is not None:
            return self._known_pairs
        if self._same_pairs is not None:
            return self._same_pairs.pairs
        return find_lengths(self.config, self.parts.tokenizer, self.pairs_per_step)

    @cached_property
    def workload(self) -> Workload:
        batching = self.batching
        key = (self.dims.num_data_ranks, batching.max_tokens, batching.max_pairs)
        if key not in self._workloads:
            self._workloads[key] = sample_workload(
                self.plan, batching, self.parts.layout, self.dims.num_data_ranks, is_assumed=self.pairs.is_assumed
            )
        return self._workloads[key].condensed if self.is_condensed else self._workloads[key]

    @property
    def batching(self) -> MicroBatching:
        training, layout = self.config.actor_train.training_args, self.parts.layout
        costs = CostModel(attention_per_key=1 / (6 * self.shape.hidden), shares_prompt=layout.shares_prompt)
        max_tokens = self.token_budget if self._packs_rows else training.max_tokens_per_micro_batch
        max_pairs = None if self._packs_rows else training.per_device_train_batch_size
        return MicroBatching(self.pairs.lengths, costs, max_tokens, max_pairs)

    @property
    def plan(self) -> Plan:
        return make_plan(
            len(self.pairs.lengths),
            seed=self.config.seed,
            pairs_per_step=self.pairs_per_step,
            max_steps=self.config.max_steps,
            num_epochs=self.config.num_train_epochs,
        )

    @property
    def token_budget(self) -> int:
        return self.config.actor_train.training_args.max_tokens_per_micro_batch or DEFAULT_TOKENS_PER_MICRO_BATCH

    @cached_property
    def reference_in_step(self) -> Literal["adapter", "copy"] | None:
        """How the policy's processes score the reference in each step: without the adapter, or with a copy of it."""
        if self.parts.mode == "adapter":
            return "adapter"
        is_beside = self.parts.mode == "concurrent" and not reference_has_workers(self.config, self.parts.mode)
        return "copy" if is_beside else None

    @property
    def _packs_rows(self) -> bool:
        return self.parts.layout.needs_pair_attention

    @property
    def recompute(self) -> Recompute:
        return self.config.actor_train.training_args.gradient_checkpointing

    @property
    def has_zero_bubble(self) -> bool:
        return self.settings.pp_schedule == "zero_bubble"

    @cached_property
    def memory_settings(self) -> MemorySettings:
        return MemorySettings(
            self.precision,
            self._packs_rows,
            zero_stage=self.settings.zero_stage,
            splits_rows=self.settings.sequence_parallel,
            recompute=self.recompute,
            offloads=self.settings.cpu_offload,
            offloads_inputs=self.config.actor_train.training_args.activation_offload,
            holds_reference=self.reference_in_step == "copy",
            micro_batches=self.workload.most_micro_batches,
            has_zero_bubble=self.has_zero_bubble,
        )

    @cached_property
    def traffic_settings(self) -> TrafficSettings:
        return TrafficSettings(
            self.precision,
            self._packs_rows,
            zero_stage=self.settings.zero_stage,
            splits_rows=self.settings.sequence_parallel,
            recompute=self.recompute,
            scores_reference=self.reference_in_step is not None,
            has_zero_bubble=self.has_zero_bubble,
            num_metrics=self._num_metrics,
            measures_entropy=self.parts.objective.measures_entropy,
        )

    @cached_property
    def _num_metrics(self) -> int:
        return len(empty_metrics(self.parts.objective)) if self._same_model is None else self._same_model._num_metrics

    def stage(self, index: int) -> Stage:
        if index not in self._stages:
            self._stages[index] = Stage.of(self.shape, self.dims, index, self.settings.virtual_pp_size)
        return self._stages[index]

    @property
    def stage_indices(self) -> dict[str, int]:
        """The first, a middle and the last stage by name; one if there is no pipeline.

        The middle one is the second: no later one has more layers, or more micro-batches in flight.
        """
        pp = self.dims.pp
        if pp == 1:
            return {"all": 0}
        return {"first": 0, "last": 1} if pp == 2 else {"first": 0, "middle": 1, "last": pp - 1}

    @cached_property
    def memories(self) -> dict[str, tuple[Stage, Memory]]:
        """The stages that are estimated, by name, each with its peak."""
        stages = {name: self.stage(index) for name, index in self.stage_indices.items()}
        largest, settings = self.workload.largest, self.memory_settings
        return {name: (stage, peak_memory(stage, largest, settings)) for name, stage in stages.items()}

    @cached_property
    def stages(self) -> list[StageEstimate]:
        return [self._stage_estimate(name, stage, memory) for name, (stage, memory) in self.memories.items()]

    def _stage_estimate(self, name: str, stage: Stage, memory: Memory) -> StageEstimate:
        steps, dummy = self.workload.steps, dummy_rows(self.parts.layout)
        flops, wire = Flops(), dict.fromkeys(AXES_OF_MESSAGES, 0.0)
        seconds: list[Roofline] = []
        for step in steps:
            own = self.flops_of_step(stage, step)
            messages = step_messages(stage, step.micro_batches, dummy, self.traffic_settings)
            for axis, sent in wire_bytes(messages).items():
                wire[axis] += sent / len(steps)
            costs = StepCosts(
                own,
                messages,
                len(step.micro_batches),
                elementwise_bytes=elementwise_bytes(
                    stage,
                    step.micro_batches,
                    self.memory_settings,
                    compiled=self.compiled,
                    scores_reference=self.reference_in_step is not None,
                ),
                trained_bytes=memory.optimizer + 2 * memory.gradients,
                zero_stage=self.settings.zero_stage,
                has_zero_bubble=self.has_zero_bubble,
            )
            seconds.append(roofline(stage, self.cluster, costs))
            flops += own
        mean = flops * (1 / len(steps))
        typical = sorted(seconds, key=lambda each: each.best)[len(seconds) // 2]
        wire = {axis: size for axis, size in wire.items() if size}
        return StageEstimate(name, memory, wire, mean, typical, self._checkpoint_bytes(stage))

    def flops_of_step(self, stage: Stage, step: Step) -> Flops:
        """FLOPs of a process of a stage in a sampled step."""
        return step_flops(
            stage,
            step.micro_batches,
            packs_rows=self._packs_rows,
            recompute=self.recompute,
            scores_reference=self.reference_in_step is not None,
        )

    def _checkpoint_bytes(self, stage: Stage) -> int:
        """Weights and both moments of the trained shards; one of the replicas writes them."""
        return 3 * self.precision.stored * stage.held.trained

    @property
    def compiled(self) -> Compiled:
        """What is compiled on GPUs, where `torch_compile: auto` compiles if it can."""
        found = compilation(self.config, torch.device("cuda"), self.config.actor_train)
        return "nothing" if found is None else found.parts

    @property
    def loaded_bytes_per_node(self) -> int:
        """Bytes that the processes of a node read when a run starts, in the precision of most model files.

        Replicas of a shard read a part of it each.
        """
        num_gpus = min(self.cluster.gpus_per_node, self.cluster.num_gpus)
        return 2 * self.stage(0).held.base * num_gpus // self.dims.dp_replicate

    @property
    def usable_memory(self) -> float:
        return (1 - RESERVED) * self.cluster.gpu.memory

    @property
    def peak(self) -> int:
        return max(memory.total for _, memory in self.memories.values())

    @property
    def fits(self) -> bool:
        return self.peak <= self.usable_memory

    @cached_property
    def largest_budget(self) -> int | None:
        """The largest token budget that fits, for micro-batches like the largest one; None: not even one pair."""
        low, high = 0, _LARGEST_BUDGET // _BUDGET_STEP
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._fits_rows(middle * _BUDGET_STEP) else (low, middle - 1)
        return low * _BUDGET_STEP or None

    def _fits_rows(self, total: int) -> bool:
        rows = _scaled(self.workload.largest, total)
        indices = {0, self.dims.pp - 1}
        return all(peak_memory(self.stage(i), rows, self.memory_settings).total <= self.usable_memory for i in indices)

    @property
    def step_seconds(self) -> tuple[float, float]:
        """Of the slowest stage, best and worst case."""
        return (
            max(stage.roofline.best for stage in self.stages),
            max(stage.roofline.worst for stage in self.stages),
        )

    @property
    def mean_seconds(self) -> float:
        """Mean of the best and the worst case: what layouts of axes are compared by."""
        return sum(self.step_seconds) / 2

    @property
    def mfu(self) -> tuple[float, float]:
        """Worst and best case: FLOPs of all stages over the time of the slowest."""
        model = self._flops_of_pipeline / self.dims.pp
        best, worst = self.step_seconds
        return model / (self.cluster.gpu.peak_flops * worst), model / (self.cluster.gpu.peak_flops * best)

    @cached_property
    def _flops_of_pipeline(self) -> float:
        """Of one process of each stage. Stages in the middle differ in the number of layers alone."""
        layers = {name: len(stage.layers) for name, (stage, _) in self.memories.items()}
        others = self.shape.num_layers - sum(number for name, number in layers.items() if name != "middle")
        return sum(
            stage.flops.model * (others / layers["middle"] if stage.name == "middle" else 1) for stage in self.stages
        )

    @property
    def hours(self) -> tuple[float, float]:
        return tuple(self.workload.plan.num_steps * seconds / 3600 for seconds in self.step_seconds)  # type: ignore[return-value]


def precision_of(args: ModelArgs, settings: FSDP2Settings) -> Precision:
    reduced, sent = (2 if dtype == "bf16" else None for dtype in (settings.reduce_dtype, settings.pp_dtype))
    return Precision(DTYPES[args.master_dtype].itemsize, DTYPES[args.dtype].itemsize, reduced, sent)


def _scaled(rows: Rows, total: int) -> Rows:
    """Rows of a micro-batch of another size with the same shares."""
    factor = total / max(1, rows.total)
    return replace(
        rows,
        total=total,
        scored=round(rows.scored * factor),
        kept=round(rows.kept * factor),
        attended=round(rows.attended * factor),
    )
