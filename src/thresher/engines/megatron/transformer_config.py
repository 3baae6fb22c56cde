"""Translate a transformers config to Megatron-Core's; reject models that Megatron-Core would compute differently.

`check` needs neither megatron-core nor weights, so it runs before any worker starts.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedConfig

from thresher.engines.megatron.declaration import MegatronSettings, MegatronSizes
from thresher.engines.megatron.weights import ModelShape
from thresher.engines.spec import ModelSpec
from thresher.errors import UserError
from thresher.models.loading.trained import TrainedParts
from thresher.models.loading.weight_files import check_shardable
from thresher.models.optimizations.recompute import Recompute

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")


def check(spec: ModelSpec[MegatronSettings]) -> None:
    """Reject what Megatron-Core cannot compute as the other engines do."""
    settings, shape = spec.settings, describe_model(spec.model_config, spec.path)
    spec.require_adamw("megatron_train")
    check_shardable(spec.path)
    check_sizes(shape, settings.sizes, spec.path)
    _check_precision(spec)
    if spec.balances_experts:
        raise UserError(
            "actor_train.model_args.moe_aux_loss_coef is not supported by megatron_train; remove it or use fsdp2_train"
        )
    if spec.training.activation_offload:
        raise UserError(
            "actor_train.training_args.activation_offload is not supported by Megatron-Core; remove it, or use "
            "fsdp2_train"
        )
    if spec.compiles:
        raise UserError("actor_train.training_args.torch_compile is not supported by Megatron-Core; remove it")
    if spec.is_synced:
        raise UserError(
            "reference.sync_steps lets the reference follow the policy, which Megatron-Core does not support; "
            "remove it or use fsdp2_train"
        )
    if settings.context_parallel_size > 1 and not spec.layout.needs_pair_attention:
        raise UserError(
            f"{spec.section}: context_parallel_size is {settings.context_parallel_size}, but the layout is "
            f"{spec.layout.name}, and context parallelism needs packed rows; remove context_parallel_size, or use "
            "layout=shared or layout=packed"
        )
    spec.require_plain_adapters("megatron_train", "use fsdp2_train")
    if spec.merged_adapters:
        raise UserError(
            "actor_train.model_args.merge_adapters is not supported with megatron_train; merge the adapters with "
            "PEFT's merge_and_unload and save that model"
        )
    if spec.trained.has_adapter:
        _check_adapters(spec.trained, shape, settings.tensor_model_parallel_size)


def _check_precision(spec: ModelSpec[MegatronSettings]) -> None:
    settings, section = spec.settings, spec.section
    for name in ("bf16", "fp16"):
        given = getattr(settings, name)
        if given is not None and given != (spec.dtype == name):
            raise UserError(
                f"{section}: strategy_config.{name} is {str(given).lower()}, but model_args.dtype is {spec.dtype}; "
                f"remove {name}, which follows from dtype"
            )
    if spec.is_policy and spec.master_dtype != "fp32":
        raise UserError(
            f"{section}.model_args.master_dtype is {spec.master_dtype}, but megatron_train always updates fp32 "
            "weights; set it to fp32"
        )
    if spec.master_dtype not in ("fp32", spec.dtype):
        raise UserError(
            f"{section}: weights are stored in {spec.master_dtype} and computed in {spec.dtype}, and Megatron-Core has "
            f"one precision for both; set master_dtype to fp32 or {spec.dtype}"
        )


def _check_adapters(trained: TrainedParts, shape: ModelShape, tp_size: int) -> None:
    if trained.lora_dropout:
        raise UserError("actor_train.model_args.lora_dropout is not supported by megatron_train; set it to 0")
    if trained.lora is not None and trained.lora.starts_from_weights:
        raise UserError(
            f"actor_train.model_args.lora_init {trained.lora.init} decomposes whole weight matrices, which "
            "megatron_train shards; use lora_init=default"
        )
    check_adapted_heads(shape, tp_size)


def check_adapted_heads(shape: ModelShape, tp_size: int) -> None:
    """Reject adapters on key/value heads that several ranks share."""
    if shape.num_kv_heads % tp_size:
        raise UserError(
            f"LoRA needs a tensor_model_parallel_size that divides the {shape.num_kv_heads} key/value heads, and it is "
            f"{tp_size}; use a smaller one"
        )


def describe_model(config: PreTrainedConfig, path: str) -> ModelShape:
    """Read the sizes of a supported model; raise a UserError for others."""
    _reject_unsupported(config, path)
    values: Any = config
    has_experts = config.model_type == "qwen3_moe"
    return ModelShape(
        vocab_size=values.vocab_size,
        hidden_size=values.hidden_size,
        num_layers=values.num_hidden_layers,
        num_heads=values.num_attention_heads,
        num_kv_heads=values.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or values.hidden_size // values.num_attention_heads,
        ffn_size=values.intermediate_size,
        num_experts=values.num_experts if has_experts else 0,
        expert_ffn_size=values.moe_intermediate_size if has_experts else 0,
    )


def check_sizes(shape: ModelShape, sizes: MegatronSizes, path: str) -> None:
    """Raise a UserError if the model cannot be split along the parallel dimensions."""
    tp, chunks = sizes.tp, sizes.pp * sizes.virtual_pp
    if shape.num_heads % tp or shape.ffn_size % tp or (shape.num_kv_heads % tp and tp % shape.num_kv_heads):
        raise UserError(
            f"tensor_model_parallel_size {tp} does not split {path}, which has {shape.num_heads} attention heads, "
            f"{shape.num_kv_heads} key/value heads and an MLP of {shape.ffn_size}; use a common divisor"
        )
    local_heads, local_kv_heads = shape.num_heads // tp, max(1, shape.num_kv_heads // tp)
    if local_heads % sizes.cp or (local_kv_heads % sizes.cp and sizes.cp % local_kv_heads):
        raise UserError(
            f"context_parallel_size {sizes.cp} does not split the {local_heads} attention heads and {local_kv_heads} "
            f"key/value heads of {path} per tensor-parallel rank; use a common divisor"
        )
    if shape.num_layers % chunks:
        raise UserError(
            f"{path} has {shape.num_layers} layers, which are not a multiple of {chunks} pipeline chunks; change "
            "pipeline_model_parallel_size or virtual_pipeline_model_parallel_size"
        )
    if sizes.ep > 1 and not shape.num_experts:
        raise UserError(f"expert_model_parallel_size has no effect: {path} has no experts; remove it")
    if shape.num_experts % sizes.ep:
        raise UserError(
            f"expert_model_parallel_size {sizes.ep} does not divide the {shape.num_experts} experts of {path}"
        )
    if shape.num_experts and tp > 1 and not sizes.sequence_parallel:
        raise UserError(
            "Megatron-Core trains experts under tensor parallelism only with sequence parallelism; set "
            "sequence_parallel to true"
        )


def _reject_unsupported(config: PreTrainedConfig, path: str) -> None:
    rope = getattr(config, "rope_parameters", None) or {}
    windows = "sliding_attention" in (getattr(config, "layer_types", None) or ())
    if config.model_type == "mistral" or getattr(config, "use_sliding_window", False):
        windows = windows or getattr(config, "sliding_window", None) is not None
    reasons = {
        "hidden_act": getattr(config, "hidden_act", "silu") != "silu",
        "attention_bias": bool(getattr(config, "attention_bias", False)),
        "mlp_bias": bool(getattr(config, "mlp_bias", False)),
        "sliding_window": windows,
        "mlp_only_layers": bool(getattr(config, "mlp_only_layers", None)),
        "decoder_sparse_step": getattr(config, "decoder_sparse_step", 1) != 1,
        "partial_rotary_factor": float(rope.get("partial_rotary_factor", 1.0)) != 1.0,
        "quantization_config": getattr(config, "quantization_config", None) is not None,
    }
    unsupported = [f"{name} {getattr(config, name, None) or rope.get(name)}" for name in reasons if reasons[name]]
    if config.model_type not in FAMILIES:
        unsupported = [f"model type {config.model_type}; supported are {', '.join(FAMILIES)}"]
    if unsupported:
        raise UserError(
            f"megatron_train and megatron_infer do not support {path}: {unsupported[0]}; use fsdp2_train and "
            "fsdp2_infer"
        )


def transformer_config(
    model: Any,  # the config of transformers
    shape: ModelShape,
    settings: MegatronSettings,
    recompute: Recompute,  # training_args.gradient_checkpointing; the settings win over it
    dtype: torch.dtype,
    device: torch.device,
) -> TransformerConfig:
    """Build Megatron-Core's config; on a CPU, without its fused kernels."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    sizes, on_gpu = settings.sizes, device.type == "cuda"
    granularity = settings.recompute_granularity or (None if recompute == "off" else recompute)
    is_full, modules = granularity == "full", settings.recompute_modules
    if modules is None and settings.recompute_granularity is None and recompute == "selective":
        modules = ["layernorm"]  # the default of Megatron-Core computes attention again
    values: dict[str, Any] = {
        "num_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "num_attention_heads": shape.num_heads,
        "num_query_groups": shape.num_kv_heads,
        "kv_channels": shape.head_dim,
        "ffn_hidden_size": shape.ffn_size,
        "activation_func": F.silu,
        "gated_linear_unit": True,
        "normalization": "RMSNorm",
        "layernorm_epsilon": model.rms_norm_eps,
        "add_bias_linear": False,
        "add_qkv_bias": model.model_type == "qwen2",
        "qk_layernorm": model.model_type in ("qwen3", "qwen3_moe"),
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": dtype,
        "pipeline_dtype": torch.float32 if settings.additional_configs.get("fp32_residual_connection") else dtype,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        "tensor_model_parallel_size": sizes.tp,
        "pipeline_model_parallel_size": sizes.pp,
        "virtual_pipeline_model_parallel_size": sizes.virtual_pp if sizes.virtual_pp > 1 else None,
        "context_parallel_size": sizes.cp,
        "expert_model_parallel_size": sizes.ep,
        "expert_tensor_parallel_size": 1,
        "sequence_parallel": sizes.sequence_parallel,
        # micro-batches of packed pairs have different lengths
        "variable_seq_lengths": sizes.pp > 1,
        # Megatron-Core's default allows no variable lengths, even without experts
        "moe_token_dispatcher_type": settings.moe_token_dispatcher_type,
        "moe_permute_fusion": settings.moe_permute_fusion and on_gpu and find_spec("transformer_engine") is not None,
        # the loss is divided by the pairs of the step; Megatron-Core must not divide it by micro-batches or ranks
        "calculate_per_token_loss": True,
        # weights are read from files: allocated on the default device, and not initialized
        "use_cpu_initialization": True,
        "perform_initialization": False,
        "recompute_granularity": granularity,
        "recompute_method": (settings.recompute_method or "uniform") if is_full else None,
        "recompute_num_layers": (settings.recompute_num_layers or 1) if is_full else None,
        "recompute_modules": modules,
        "gradient_accumulation_fusion": False,
        "bias_dropout_fusion": on_gpu,
        "bias_activation_fusion": settings.bias_activation_fusion and on_gpu,
        "persist_layer_norm": False,
    }
    if shape.num_experts:
        values |= {
            "num_moe_experts": shape.num_experts,
            "moe_ffn_hidden_size": shape.expert_ffn_size,
            "moe_router_topk": model.num_experts_per_tok,
            # a softmax over the selected experts equals one over all experts, divided by the sum of the selected
            "moe_router_pre_softmax": not model.norm_topk_prob,
            "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0,
            "moe_router_dtype": "fp32",
        }
    if sizes.virtual_pp > 1:
        # one message per direction: with 2 stages, the next one is also the previous one, and a batch would mix them up
        values |= {"overlap_p2p_comm": True, "batch_p2p_comm": False}
    return TransformerConfig(**values | settings.additional_configs)
