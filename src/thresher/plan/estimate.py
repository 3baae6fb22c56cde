"""Apply the closed forms to a config: memory and time of the first, a middle and the last pipeline stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from thresher.builders.engines import compilation
from thresher.builders.hardware import Compiled, Hardware
from thresher.builders.inputs import DEFAULT_TOKENS_PER_MICRO_BATCH, RunInputs
from thresher.builders.memory import RESERVED, Memory, ModelSize, Process, peak_memory
from thresher.builders.token_budget import GPUS_PER_NODE, BudgetChoice, model_size, policy_process
from thresher.config import DPOConfig
from thresher.data.batching.batches import CostModel, MicroBatching
from thresher.data.batching.plan import Plan, make_plan
from thresher.distributed.mesh import ParallelDims
from thresher.engines.native.check import check_axes, why_not_sequence_parallel
from thresher.engines.native.declaration import FSDP2Settings
from thresher.engines.native.optimizers.registry import state_bytes
from thresher.errors import UserError
from thresher.models.router import num_experts, splits_experts
from thresher.plan.step import (
    Cluster,
    Flops,
    MeshDim,
    StepTime,
    pipeline_model_flops,
    step_flops,
    step_time,
    wire_bytes,
)
from thresher.plan.workload import PairLengths, Workload, find_lengths, sample_workload


class KnownRun:
    """What the estimates of a search share: model, pairs, and the steps that were sampled of them."""

    def __init__(self, config: DPOConfig, pairs: PairLengths | None = None):
        self.config, self.parts = config, RunInputs(config)
        self.workloads: dict[tuple[object, ...], Workload] = {}
        self._pairs = pairs

    @cached_property
    def size(self) -> ModelSize:
        return model_size(self.parts)

    def pairs(self, pairs_per_step: int) -> PairLengths:
        """Lengths of the pairs; assumed ones are made for the first number of pairs per step."""
        if self._pairs is None:
            self._pairs = find_lengths(self.config, self.parts, pairs_per_step)
        return self._pairs


@dataclass(frozen=True)
class StageEstimate:
    """A process of a pipeline stage in a step."""

    name: str
    memory: Memory
    wire_bytes: dict[MeshDim, float]
    flops: Flops
    time: StepTime


class Estimate:
    """A run on some GPUs, by closed form. Every figure is computed on first use."""

    def __init__(
        self, config: DPOConfig, cluster: Cluster, known: KnownRun | None = None, budget_reason: str | None = None
    ):
        """known: what an estimate of the same model and pairs has read. budget_reason: of a chosen token budget."""
        self.config, self.cluster, self.budget_reason = config, cluster, budget_reason
        self.known = known or KnownRun(config)
        self.parts = self.known.parts
        self.process = policy_process(config, self.parts, self.known.size, cluster.num_gpus)
        try:
            self.settings.check_workers(cluster.num_gpus)
        except ValueError as error:
            raise UserError(f"actor_train: {error}") from None
        model = self.parts.model_configs[self.parts.policy_path]
        check_axes(self.settings, cluster.num_gpus, "actor_train", model, self.parts.layout)

    def but(
        self,
        *,
        training: Mapping[str, Any] | None = None,
        strategy: Mapping[str, Any] | None = None,
        model: Mapping[str, Any] | None = None,
        cluster: Cluster | None = None,
        budget_reason: str | None = None,
    ) -> Estimate:
        """The same run with other settings of the policy, or on other GPUs; UserError if they exclude each other."""
        role, known = self.config.actor_train, self.known
        changed: dict[str, Any] = {}
        if training:
            changed["training_args"] = role.training_args.model_copy(update=training)
        if strategy:
            values = {**self.settings.model_dump(exclude_defaults=True), **strategy}
            given = {"strategy_name": role.strategy_name, "strategy_config": values}
            try:
                changed["strategy_args"] = type(role.strategy_args).model_validate(given)
            except ValueError as error:
                raise UserError(f"actor_train: {error}") from None
        if model:
            changed["model_args"] = role.model_args.model_copy(update=model)
        config = self.config.model_copy(update={"actor_train": role.model_copy(update=changed)})
        if model:
            known = KnownRun(config, self.pairs)
        return Estimate(config, cluster or self.cluster, known, budget_reason)

    @property
    def settings(self) -> FSDP2Settings:
        return self.process.settings

    @property
    def dims(self) -> ParallelDims:
        return self.process.dims

    @property
    def allows_sequence_parallel(self) -> bool:
        model = self.parts.model_configs[self.parts.policy_path]
        return why_not_sequence_parallel(model, self.parts.layout, has_lora=self.config.uses_lora) is None

    @property
    def num_experts(self) -> int:
        """Experts of a layer that expert parallelism can split; 0 without any."""
        text = self.parts.model_configs[self.parts.policy_path].get_text_config()
        return num_experts(text) if splits_experts(text) else 0

    @property
    def pairs_per_step(self) -> int:
        return self.config.actor_train.training_args.pairs_per_step(self.dims.num_data_ranks)

    @property
    def pairs(self) -> PairLengths:
        return self.known.pairs(self.pairs_per_step)

    @property
    def token_budget(self) -> int:
        return self.config.actor_train.training_args.max_tokens_per_micro_batch or DEFAULT_TOKENS_PER_MICRO_BATCH

    @property
    def batching(self) -> MicroBatching:
        training, layout = self.config.actor_train.training_args, self.parts.layout
        costs = CostModel(attention_per_key=1 / (6 * self.known.size.hidden), shares_prompt=layout.shares_prompt)
        if layout.needs_pair_attention:
            return MicroBatching(self.pairs.lengths, costs, self.token_budget)
        max_pairs = training.per_device_train_batch_size
        return MicroBatching(self.pairs.lengths, costs, training.max_tokens_per_micro_batch, max_pairs)

    @property
    def plan(self) -> Plan:
        return make_plan(
            len(self.pairs.lengths),
            seed=self.config.seed,
            pairs_per_step=self.pairs_per_step,
            max_steps=self.config.max_steps,
            num_epochs=self.config.num_train_epochs,
        )

    @cached_property
    def workload(self) -> Workload:
        batching, ranks = self.batching, self.dims.num_data_ranks
        key = (ranks, self.pairs_per_step, batching.max_tokens, batching.max_pairs)
        if key not in self.known.workloads:
            self.known.workloads[key] = sample_workload(
                self.plan,
                batching,
                self.parts.layout,
                ranks,
                is_assumed=self.pairs.is_assumed,
                has_mismatched=self.pairs.has_mismatched,
            )
        return self.known.workloads[key]

    @property
    def compiled(self) -> Compiled:
        """What is compiled on GPUs, where `torch_compile: auto` compiles if it can."""
        found = compilation(self.config, torch.device("cuda"), self.config.actor_train)
        return "nothing" if found is None else found.parts

    @cached_property
    def processes(self) -> dict[str, Process]:
        """A process of the first, a middle and the last stage by name; one if there is no pipeline."""
        pp = self.dims.pp
        if pp == 1:
            return {"all": self.process}
        # the middle one is the second: no later one has more layers, or more micro-batches in flight
        stages = {"first": 0, "last": 1} if pp == 2 else {"first": 0, "middle": 1, "last": pp - 1}
        return {name: replace(self.process, stage=stage) for name, stage in stages.items()}

    @cached_property
    def memories(self) -> dict[str, Memory]:
        largest, most = self.workload.largest, self.workload.most_micro_batches
        return {
            name: peak_memory(process, largest.total, largest.scored, most) for name, process in self.processes.items()
        }

    @cached_property
    def stages(self) -> list[StageEstimate]:
        step, count, mismatched = self.workload.step, self.workload.micro_batches, self.workload.mismatched
        return [
            StageEstimate(
                name,
                self.memories[name],
                wire_bytes(process, step, count, mismatched),
                step_flops(process, step, mismatched),
                step_time(process, self.cluster, step, count, self.compiled, mismatched=mismatched),
            )
            for name, process in self.processes.items()
        ]

    @property
    def checkpoint_bytes(self) -> float:
        """Weights and optimizer state of the trained shards of a process; one of the replicas writes them."""
        stored = self.process.stored
        per_element = stored + state_bytes(self.process.training, stored)
        return per_element * max(process.shards.trained for process in self.processes.values())

    @property
    def loaded_bytes_per_node(self) -> float:
        """Bytes that the processes of a node read when a run starts, in the precision of most model files."""
        num_gpus = min(self.cluster.gpus_per_node, self.cluster.num_gpus)
        # replicas of a shard read a part of it each; to quantize a matrix, a process reads all of it
        process = self.process
        read = process.elements.packed + process.shards.total - process.shards.packed
        return 2 * read * num_gpus / self.dims.dp_replicate

    @property
    def usable_memory(self) -> float:
        return (1 - RESERVED) * self.cluster.gpu.memory

    @property
    def peak(self) -> float:
        return max(memory.total for memory in self.memories.values())

    @property
    def fits(self) -> bool:
        return self.peak <= self.usable_memory

    @property
    def budget_choice(self) -> BudgetChoice:
        processes = list(self.processes.values())
        return BudgetChoice.of(processes, self.pairs.lengths, self.parts.layout, self.pairs_per_step)

    @property
    def largest_budget(self) -> int | None:
        """The largest token budget that fits for certain; None: not even one pair."""
        return self.budget_choice.largest(self.cluster.gpu)

    def with_chosen_budget(self) -> Estimate:
        """The estimate of the run as it will be: with the budget that is chosen for it if the config sets none."""
        if self.config.actor_train.training_args.max_tokens_per_micro_batch is not None:
            return self
        tokens, reason = self.budget_choice.choose(self.cluster.gpu, self.cluster.gpus_per_node)
        return self.but(training={"max_tokens_per_micro_batch": tokens}, budget_reason=reason)

    @property
    def step_seconds(self) -> float:
        """Expected seconds of a step of the slowest stage."""
        return max(stage.time.total for stage in self.stages)

    @property
    def mfu(self) -> float:
        """Model FLOPs of all stages over what the GPUs could compute in the time of the slowest stage."""
        model = pipeline_model_flops(self.process, self.workload.step) / self.dims.pp
        return model / (self.cluster.gpu.peak_flops * self.step_seconds)

    @property
    def hours(self) -> float:
        return self.plan.num_steps * self.step_seconds / 3600


def estimate_run(
    config: DPOConfig, gpu: Hardware, nodes: int | None = None, gpus_per_node: int | None = None
) -> Estimate:
    """Estimate a run with one worker per GPU; nodes and gpus_per_node replace the number of workers of the config."""
    if (name := config.actor_train.strategy_name) != "fsdp2_train":
        raise UserError(
            f"plan estimates fsdp2_train, and actor_train uses {name}; for a first estimate, set "
            "actor_train.strategy_args.strategy_name=fsdp2_train and its sizes"
        )
    per_node = gpus_per_node or GPUS_PER_NODE
    is_given = nodes is not None or gpus_per_node is not None
    num_gpus = (nodes or 1) * per_node if is_given else config.actor_train.num_processes
    return Estimate(config, Cluster(gpu, per_node, num_gpus))
