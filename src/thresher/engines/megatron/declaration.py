"""Megatron-Core under the names megatron_train and megatron_infer, and its settings, named as in Megatron."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, JsonValue, PositiveInt, model_validator

from thresher.config.strategies import StrategyDeclaration, StrategySettings, not_a_multiple

_PACKAGE = "thresher.engines.megatron"
_AXES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
# fields of TransformerConfig that follow from the model, the precision or the loss
SET_BY_THRESHER = (
    *("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "kv_channels", "ffn_hidden_size"),
    *("activation_func", "gated_linear_unit", "normalization", "layernorm_epsilon", "add_bias_linear", "add_qkv_bias"),
    *("qk_layernorm", "hidden_dropout", "attention_dropout", "params_dtype", "pipeline_dtype", "bf16", "fp16"),
    *("variable_seq_lengths", "calculate_per_token_loss", "use_cpu_initialization", "perform_initialization"),
    *("gradient_accumulation_fusion", "persist_layer_norm", "num_moe_experts", "moe_ffn_hidden_size"),
    *("moe_router_topk", "moe_router_pre_softmax", "moe_router_load_balancing_type", "moe_aux_loss_coeff"),
    *("moe_router_dtype", "no_sync_func", "finalize_model_grads_func", "grad_scale_func", "overlap_p2p_comm"),
    "batch_p2p_comm",
)


def _as_list(value: Any) -> Any:
    return [part.strip() for part in value.split(",")] if isinstance(value, str) else value


@dataclass(frozen=True)
class MegatronSizes:
    """Size of each parallel dimension of Megatron-Core."""

    tp: int = 1
    pp: int = 1
    # model chunks per pipeline stage
    virtual_pp: int = 1
    cp: int = 1
    # splits the experts over data-parallel (and cp and tp) ranks, which otherwise hold the same weights, so it is not a
    # factor of the number of processes
    ep: int = 1
    sequence_parallel: bool = False


class MegatronSettings(StrategySettings):
    """`strategy_config` of the megatron strategies. The workers left over by these sizes are data-parallel ranks."""

    spellings: ClassVar[Mapping[str, str]] = {
        "tp_size": "tensor_model_parallel_size",
        "pp_size": "pipeline_model_parallel_size",
        "virtual_pp_size": "virtual_pipeline_model_parallel_size",
        "cp_size": "context_parallel_size",
        "ep_size": "expert_model_parallel_size",
        "etp_size": "expert_tensor_parallel_size",
        "expert_tensor_model_parallel_size": "expert_tensor_parallel_size",
    }

    tensor_model_parallel_size: PositiveInt = 1
    """Workers that split each weight matrix."""
    sequence_parallel: bool = False
    """Split the rows between the matrices over the tensor-parallel workers too, which saves memory; needed for experts
    under tensor parallelism. No effect if tensor_model_parallel_size is 1."""
    pipeline_model_parallel_size: PositiveInt = 1
    """Number of stages, each with a part of the layers."""
    virtual_pipeline_model_parallel_size: PositiveInt | None = None
    """Virtual stages per pipeline stage; more than one selects the interleaved schedule."""
    context_parallel_size: PositiveInt = 1
    """Workers that split each packed row."""
    expert_model_parallel_size: PositiveInt = 1
    """Workers that split a layer's experts; must divide the workers of a pipeline stage."""
    expert_tensor_parallel_size: Literal[1] | None = None
    """Workers that split an expert's matrices: only 1 is supported."""
    use_distributed_optimizer: bool = True
    """Shard the optimizer state and fp32 weights over data-parallel ranks. No effect on megatron_infer."""
    overlap_grad_reduce: bool = False
    """Reduce gradients during the last micro-batch's backward; all ranks then run the same number of micro-batches. No
    effect on megatron_infer."""
    overlap_param_gather: bool = False
    """Gather updated weights during the next forward; needs use_distributed_optimizer and overlap_grad_reduce. No
    effect on megatron_infer."""
    recompute_granularity: Literal["full", "selective"] | None = None
    """Recompute whole layers or recompute_modules in the backward. When absent, as training_args.gradient_checkpointing
    says, whose `selective` recomputes the norms (`layernorm`)."""
    recompute_method: Literal["uniform", "block"] | None = None
    """With `full`: recompute every layer, in units of recompute_num_layers (`uniform`, the default), or only the first
    recompute_num_layers layers of a stage (`block`)."""
    recompute_num_layers: PositiveInt | None = None
    """See recompute_method; 1 when absent."""
    recompute_modules: (
        Annotated[list[Literal["core_attn", "layernorm", "mlp", "moe"]], BeforeValidator(_as_list)] | None
    ) = None
    """With `selective`: any of core_attn (the default), layernorm, mlp and moe, as a list or joined with commas."""
    moe_token_dispatcher_type: Literal["alltoall", "allgather"] = "alltoall"  # noqa: S105
    """How tokens reach their experts' workers."""
    moe_grouped_gemm: bool = False
    """Accepted for ROLL's configs: a worker's experts are always computed in one grouped product."""
    moe_shared_expert_overlap: bool = False
    """Accepted for ROLL's configs: no supported model has shared experts."""
    moe_permute_fusion: bool = False
    """Sort tokens by expert in one kernel; no effect without Transformer Engine."""
    bias_activation_fusion: bool = True
    """Compute bias and activation in one kernel."""
    bf16: bool | None = None
    """Must agree with model_args.dtype."""
    fp16: bool | None = None
    """Must agree with model_args.dtype."""
    additional_configs: dict[str, JsonValue] = {}
    """Further fields of Megatron-Core's TransformerConfig."""

    @property
    def sizes(self) -> MegatronSizes:
        tp = self.tensor_model_parallel_size
        return MegatronSizes(
            tp=tp,
            pp=self.pipeline_model_parallel_size,
            virtual_pp=self.virtual_pipeline_model_parallel_size or 1,
            cp=self.context_parallel_size,
            ep=self.expert_model_parallel_size,
            sequence_parallel=self.sequence_parallel and tp > 1,
        )

    @property
    def workers_per_data_rank(self) -> int:
        sizes = self.sizes
        return sizes.tp * sizes.pp * sizes.cp

    @property
    def splits_rows(self) -> bool:
        return self.context_parallel_size > 1

    def is_replicated(self, num_workers: int) -> bool:
        return num_workers == 1

    def check_workers(self, num_workers: int) -> None:
        factors = [f"{name} {getattr(self, name)}" for name in _AXES if getattr(self, name) > 1]
        if num_workers % self.workers_per_data_rank:
            raise ValueError(not_a_multiple(num_workers, self.workers_per_data_rank, factors))
        per_stage = num_workers // self.pipeline_model_parallel_size
        if per_stage % self.expert_model_parallel_size:
            raise ValueError(
                f"has {per_stage} workers per pipeline stage, which is not a multiple of expert_model_parallel_size "
                f"{self.expert_model_parallel_size}; use more workers or a smaller size"
            )

    @classmethod
    def canonical(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Also take settings that have a key here out of additional_configs."""
        named = super().canonical(values)
        additional = named.get("additional_configs")
        if not isinstance(additional, dict):
            return named
        moved = {name: value for name, value in additional.items() if name in cls.model_fields}
        if both := [name for name in moved if name in named]:
            raise ValueError(f"additional_configs.{both[0]} and {both[0]} are the same setting; keep one")
        rest = {name: value for name, value in additional.items() if name not in moved}
        return {**named, **moved, "additional_configs": rest}

    @model_validator(mode="after")
    def _validate(self) -> MegatronSettings:
        if (self.virtual_pipeline_model_parallel_size or 1) > 1 and self.pipeline_model_parallel_size == 1:
            raise ValueError(
                "virtual_pipeline_model_parallel_size has no effect without pipeline_model_parallel_size; set it"
            )
        if self.overlap_param_gather and not (self.use_distributed_optimizer and self.overlap_grad_reduce):
            raise ValueError("overlap_param_gather needs use_distributed_optimizer and overlap_grad_reduce; set both")
        of_full = [name for name in ("recompute_method", "recompute_num_layers") if getattr(self, name) is not None]
        if of_full and self.recompute_granularity != "full":
            raise ValueError(f"{of_full[0]} has no effect without recompute_granularity full; set it")
        if self.recompute_modules is not None and self.recompute_granularity != "selective":
            raise ValueError("recompute_modules has no effect without recompute_granularity selective; set it")
        if self.bf16 and self.fp16:
            raise ValueError("bf16 and fp16 exclude each other; remove both and set model_args.dtype")
        if reserved := [name for name in self.additional_configs if name in SET_BY_THRESHER]:
            raise ValueError(
                f"additional_configs.{reserved[0]} follows from the model and the settings of the run; remove it"
            )
        return self


TRAIN = StrategyDeclaration(
    MegatronSettings,
    build_train=f"{_PACKAGE}.build:build_train",
    build_infer=f"{_PACKAGE}.build:build_infer",
    check=f"{_PACKAGE}.transformer_config:check",
    install="pip install 'thresher[megatron]'",
    needs_gpu=True,
    modules=("megatron.core",),
    reward_models=False,
)
INFER = replace(TRAIN, build_train=None)
