"""The native engine under the names fsdp2_train, fsdp2_infer and hf_infer, and its settings."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Literal

from pydantic import JsonValue, PositiveInt, field_validator, model_validator

from thresher.config.strategies import CompiledParts, StrategyDeclaration, StrategySettings, not_a_multiple

_PACKAGE = "thresher.engines.native"


class FSDP2Settings(StrategySettings):
    """`strategy_config` of the fsdp2 strategies. The workers left over by these sizes shard the model (FSDP2)."""

    tp_size: PositiveInt = 1
    """Tensor-parallel size: workers that split each weight matrix."""
    pp_size: PositiveInt = 1
    """Pipeline-parallel size: number of stages, each with a part of the layers."""
    virtual_pp_size: PositiveInt = 1
    """Virtual stages per pipeline stage; more than one selects the interleaved schedule, which shrinks the bubble."""
    pp_schedule: Literal["1f1b", "zero_bubble"] = "1f1b"
    """Order of the micro-batches in a pipeline. zero_bubble computes weight gradients where a stage would wait; it
    supports neither workers that shard the model, nor gradient_checkpointing, nor torch_compile."""
    pp_dtype: Literal["fp32", "bf16"] = "fp32"
    """Precision of the hidden states and gradients that stages exchange. bf16 halves these bytes and rounds the
    residual stream between stages; it needs dtype bf16 with fp32 weights."""
    sequence_parallel: bool = False
    """Split the rows of the residual stream and the norms over the tensor-parallel workers too: less activation memory
    and communication. For Llama-like models with a packed layout, without LoRA."""
    cp_size: PositiveInt = 1
    """Context-parallel size: workers that split each packed row, for long sequences."""
    ep_size: PositiveInt = 1
    """Expert-parallel size: workers that split the experts of each layer, among those that share a replica and a
    pipeline stage. Rows travel to their experts; otherwise the weights of all experts travel to each worker."""
    dp_replicate: PositiveInt = 1
    """Number of model replicas (HSDP), each sharded over its workers. Equal to the number of workers: no sharding."""
    zero_stage: Literal[1, 2, 3] = 3
    """3: weights are gathered per layer, in the forward and again in the backward. 2: they stay gathered until the
    backward, for the memory of the whole model in the compute precision. 1: they stay gathered for a step, and
    gradients are reduced once, for the memory of the whole gradient too."""
    reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """Precision in which FSDP2 sums gradients over workers. bf16 halves these bytes and rounds each partial sum; it
    needs dtype bf16 with fp32 weights, zero_stage 2 or 3 and no dp_replicate."""
    cpu_offload: bool = False
    """Keep shards of weights, gradients and optimizer state in host memory between uses."""

    @field_validator("zero_stage", mode="before")
    @classmethod
    def _reject_true(cls, value: Any) -> Any:
        return str(value) if isinstance(value, bool) else value  # it would pass for 1

    @property
    def workers_per_data_rank(self) -> int:
        return self.tp_size * self.pp_size * self.cp_size

    @property
    def splits_rows(self) -> bool:
        return self.cp_size > 1

    @property
    def compiled_parts(self) -> CompiledParts | None:
        if self.pp_schedule != "1f1b":
            return None  # it splits the backward
        # whole layers of DTensors of tp end in a RecursionError of torch's tracer
        has_messages = max(self.pp_size, self.cp_size, self.ep_size, self.tp_size) > 1
        return "functions" if has_messages else "layers"

    def is_replicated(self, num_workers: int) -> bool:
        return self.workers_per_data_rank == 1 and self.num_shards(num_workers) == 1

    def num_shards(self, num_workers: int) -> int:
        """Data-parallel workers that shard the model."""
        return max(1, num_workers // (self.workers_per_data_rank * self.dp_replicate))

    def check_workers(self, num_workers: int) -> None:
        unused = self.non_default("cpu_offload", "zero_stage", "reduce_dtype")
        shards = self.num_shards(num_workers) * self.cp_size
        is_sharded = shards > 1 or self.ep_size > 1
        if unused and not is_sharded:
            raise ValueError(
                f"strategy_args.strategy_config.{unused[0]} has no effect: no two workers shard the model; use more "
                "workers or remove it"
            )
        splitting = shards * self.tp_size
        if splitting % self.ep_size:
            raise ValueError(
                f"strategy_args.strategy_config.ep_size {self.ep_size} does not divide the {splitting} workers that "
                f"share a replica and a pipeline stage; use a divisor of {splitting}, or more workers"
            )
        if self.pp_schedule == "zero_bubble" and is_sharded:
            raise ValueError(
                "strategy_args.strategy_config.pp_schedule zero_bubble does not support workers that shard the model: "
                "set cp_size to 1, and dp_replicate to the number of workers divided by pp_size x tp_size"
            )
        product = self.workers_per_data_rank * self.dp_replicate
        if num_workers % product == 0:
            return
        sizes = {name: getattr(self, name) for name in ("pp_size", "dp_replicate", "cp_size", "tp_size")}
        factors = [f"{name} {size}" for name, size in sizes.items() if size > 1]
        raise ValueError(not_a_multiple(num_workers, product, factors))

    def fit(self, num_workers: int, available: int) -> tuple[int, dict[str, JsonValue]]:
        """Remove whole replicas before making shards larger, which need more memory."""
        per_replica = self.workers_per_data_rank * self.num_shards(num_workers)
        if self.dp_replicate > 1 and available >= per_replica:
            replicas = available // per_replica
            return replicas * per_replica, {"dp_replicate": replicas}
        changes: dict[str, JsonValue] = {} if self.dp_replicate == 1 else {"dp_replicate": 1}
        left = super().fit(num_workers, available)[0]
        if (left // self.pp_size) % self.ep_size:
            common = math.gcd(left // self.pp_size, self.ep_size)
            changes["ep_size"] = common if common > 1 else self.tp_size  # experts under tp need it
        return left, changes

    @model_validator(mode="after")
    def _validate_combinations(self) -> FSDP2Settings:
        if self.virtual_pp_size > 1 and self.pp_size == 1:
            raise ValueError("virtual_pp_size has no effect without pp_size; set pp_size")
        for name in self.non_default("pp_schedule", "pp_dtype"):
            if self.pp_size == 1:
                raise ValueError(f"{name} has no effect without pp_size; set pp_size")
        if self.sequence_parallel and self.tp_size == 1:
            raise ValueError("sequence_parallel has no effect without tp_size; set tp_size")
        if self.reduce_dtype == "bf16" and (self.zero_stage == 1 or self.dp_replicate > 1):
            name = "zero_stage 1" if self.zero_stage == 1 else "dp_replicate"
            raise ValueError(
                f"reduce_dtype bf16 with {name} would add up micro-batches in bf16; use zero_stage 2 or 3 and no "
                "dp_replicate, or remove reduce_dtype"
            )
        if self.virtual_pp_size > 1 and self.zero_stage == 1:
            raise ValueError(
                "zero_stage 1 does not support virtual_pp_size; use zero_stage 2, or remove virtual_pp_size"
            )
        return self


class ReplicaSettings(StrategySettings):
    """`strategy_config` of hf_infer, which has no settings."""

    @property
    def compiled_parts(self) -> CompiledParts | None:
        return "layers"

    @model_validator(mode="before")
    @classmethod
    def _reject_settings(cls, values: Any) -> Any:
        if values:
            raise ValueError(
                "has no effect with hf_infer, which keeps a full copy per worker; remove it, or set strategy_name to "
                "fsdp2_infer"
            )
        return values


TRAIN = StrategyDeclaration(
    FSDP2Settings,
    build_train=f"{_PACKAGE}.build:build_train",
    build_infer=f"{_PACKAGE}.build:build_infer",
    check=f"{_PACKAGE}.check:check",
    quantization=True,
)
INFER = replace(TRAIN, build_train=None)
REPLICATED = StrategyDeclaration(ReplicaSettings, build_infer=f"{_PACKAGE}.build:build_replica", quantization=True)
