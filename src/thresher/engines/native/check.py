"""Checks that a model supports the native engine's mesh dimensions and settings, before any worker starts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from thresher.engines.native.build import axis_sizes
from thresher.engines.native.declaration import FSDP2Settings
from thresher.engines.native.fsdp import sharded_dim
from thresher.engines.native.optimizers.blocks import BLOCK, blocks_of_shard, has_blocks
from thresher.engines.native.optimizers.groups import check_groups_match, group_rules
from thresher.engines.native.optimizers.registry import OPTIMIZERS, Shards, build_optimizer
from thresher.engines.spec import ModelSpec
from thresher.errors import UserError
from thresher.models.branching_state import splits_over
from thresher.models.layouts import Layout
from thresher.models.loading.load_sharded import cannot_quantize, check_tensors
from thresher.models.loading.quantization import import_bitsandbytes
from thresher.models.loading.weight_files import check_shardable
from thresher.models.optimizations.llama_layers import LLAMA_LIKE_FAMILIES
from thresher.models.router import FAMILIES as ROUTER_FAMILIES
from thresher.models.router import num_experts, splits_experts


def check(spec: ModelSpec[FSDP2Settings]) -> None:
    """Reject settings that this model does not support."""
    settings, is_replicated = spec.settings, spec.settings.is_replicated(spec.world.size)
    if spec.balances_experts:
        other = "torch_compile" if spec.compiles else next(iter(settings.non_default("pp_schedule")), None)
        if other is not None:
            raise UserError(
                f"actor_train.model_args.moe_aux_loss_coef is not supported with {other}; remove one of them"
            )
        check_router_family(spec)
    if spec.is_policy:
        _check_optimizer(spec, is_replicated=is_replicated)
    lora = spec.trained.lora
    if lora is not None and lora.starts_from_weights and not is_replicated:
        raise UserError(
            f"actor_train.model_args.lora_init {lora.init} decomposes whole weight matrices, which cannot be sharded; "
            "set actor_train.strategy_args.strategy_config.dp_replicate to the number of workers, or use the default"
        )
    if spec.scores_steps_twice and spec.trained.lora_dropout and settings.pp_size > 1:
        raise UserError(
            "a loss that couples all pairs of a step scores them twice, and pipeline stages cannot repeat the "
            "dropout masks; set actor_train.model_args.lora_dropout to 0, or "
            "actor_train.strategy_args.strategy_config.pp_size to 1"
        )
    if spec.is_quantized:
        _check_quantization(spec, is_replicated=is_replicated)
    if is_replicated:
        return
    check_shardable(spec.path)
    check_axes(settings, spec.world.size, spec.section, spec.model_config, spec.layout)
    for name in settings.non_default("tp_size", "pp_size", "ep_size"):
        spec.require_plain_adapters(name, f"remove {name}", allows_dora=name != "tp_size")
    if settings.sequence_parallel:
        reason = why_not_sequence_parallel(spec.model_config, spec.layout, has_lora=spec.trained.has_adapter)
        if reason is not None:
            raise UserError(f"{spec.section}: sequence_parallel is set, but {reason}; remove sequence_parallel")
    for name in settings.non_default("reduce_dtype", "pp_dtype"):
        if (spec.dtype, spec.master_dtype) != ("bf16", "fp32"):
            raise UserError(
                f"{spec.section}: {name} bf16 needs dtype bf16 and master_dtype fp32, and they are {spec.dtype} and "
                f"{spec.master_dtype}; remove {name}"
            )
    if settings.pp_schedule != "1f1b" and (spec.compiles or spec.training.gradient_checkpointing != "off"):
        name = "torch_compile" if spec.compiles else "gradient_checkpointing"
        raise UserError(
            f"{spec.section}: pp_schedule {settings.pp_schedule} splits the backward, which {name} does not "
            "support; remove one of them"
        )
    if Path(spec.path).exists():  # a model on the Hub may not be downloaded yet
        check_tensors(spec.empty(), spec.path)


def _check_quantization(spec: ModelSpec[FSDP2Settings], *, is_replicated: bool) -> None:
    import_bitsandbytes()
    for name in spec.settings.non_default("tp_size", "ep_size"):
        raise UserError(
            f"{spec.section}: {name} splits matrices, and quantized ones cannot be split: the blocks that share a "
            "constant run along the rows of a whole matrix; remove it, and let more workers shard the model"
        )
    if is_replicated and Path(spec.path).exists():  # as in `check`
        if (model := spec.empty_to_share()) is None:
            raise cannot_quantize(spec.path)
        check_tensors(model, spec.path)


def _check_optimizer(spec: ModelSpec[FSDP2Settings], *, is_replicated: bool) -> None:
    training, parameter = spec.training, nn.Parameter(torch.zeros(2, 2))
    try:
        build_optimizer([{"params": [parameter]}], training, Shards([parameter], {parameter: parameter.numel()}))
    except (TypeError, ValueError) as error:
        raise UserError(f"{spec.section}.training_args.optim_args: {training.optim} says: {error}") from error
    kind = OPTIMIZERS[training.optim]
    if not kind.is_elementwise and not is_replicated:
        raise UserError(
            f"{spec.section}.training_args.optim {training.optim} needs whole matrices, which workers that split the "
            f"model do not have; set {spec.section}.strategy_args.strategy_config.dp_replicate to the number of "
            "workers, or use optim=adamw"
        )
    if training.optim == "muon" and spec.trained.has_adapter:
        raise UserError(
            f"{spec.section}.training_args.optim muon is not meant for the factors of LoRA adapters; use optim=adamw, "
            "or train all weights"
        )
    is_split = kind.is_blockwise and not is_replicated
    if not is_split and not group_rules(training, spec.model_args):
        return
    module = spec.trained.apply(spec.without_weights())
    trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    check_groups_match(training, spec.model_args, trained)
    if is_split:
        _check_blocks(spec, trained)


def _check_blocks(spec: ModelSpec[FSDP2Settings], trained: Mapping[str, nn.Parameter]) -> None:
    """Reject shards that cut the blocks of an 8-bit state, which would then depend on the mesh."""
    sizes, optim = axis_sizes(spec.settings, spec.world.size), spec.training.optim
    for name in ("tp", "ep"):
        if getattr(sizes, name) > 1:
            raise UserError(
                f"{spec.section}: optim {optim} has its state in blocks of {BLOCK} elements, and {name}_size "
                f"{getattr(sizes, name)} cuts matrices in other places; remove {name}_size, or use optim=adamw"
            )
    for name, parameter in trained.items():
        dim = sharded_dim(parameter, sizes.fsdp_size)
        if not has_blocks(parameter.ndim, parameter.numel()) or parameter.shape[dim] == 1:
            continue
        first = [slice(0, size) for size in parameter.shape]
        first[dim] = slice(0, -(-parameter.shape[dim] // sizes.fsdp_size))
        if blocks_of_shard(parameter.shape, first) is None:
            raise UserError(
                f"{spec.section}: optim {optim} has its state in blocks of {BLOCK} elements, and {sizes.fsdp_size} "
                f"shards of {name}, {list(parameter.shape)}, do not consist of whole blocks; use another number of "
                "workers, dp_replicate, or optim=adamw"
            )


def why_not_sequence_parallel(model_config: PreTrainedConfig, layout: Layout, *, has_lora: bool) -> str | None:
    """Why a model does not support sequence parallelism; None if it does."""
    family = model_config.get_text_config().model_type
    if family not in LLAMA_LIKE_FAMILIES:
        return f"the architecture is {family}, and it supports {', '.join(LLAMA_LIKE_FAMILIES)}"
    if not layout.needs_pair_attention:
        return f"the layout is {layout.name}, and it needs packed rows"
    return "it does not support LoRA" if has_lora else None


def check_router_family(spec: ModelSpec[Any]) -> None:
    """Reject moe_aux_loss_coef for a model whose experts' load is not known."""
    family = spec.model_config.get_text_config().model_type
    if family not in ROUTER_FAMILIES:
        raise UserError(
            f"actor_train.model_args.moe_aux_loss_coef has no effect on {spec.path}: the load of experts is known for "
            f"the architectures {', '.join(ROUTER_FAMILIES)}, and this one is {family}; remove it"
        )


def check_axes(
    settings: FSDP2Settings, num_workers: int, section: str, model_config: PreTrainedConfig, layout: Layout
) -> None:
    """Reject mesh dimensions that this model or layout does not support, listing the valid sizes."""
    sizes = axis_sizes(settings, num_workers)
    text = model_config.get_text_config()
    heads, layers = int(text.num_attention_heads), int(text.num_hidden_layers)
    kv_heads = int(getattr(text, "num_key_value_heads", None) or heads)
    if sizes.tp > 1 and not text.base_model_tp_plan:
        raise UserError(
            f"{section}: tp_size is {sizes.tp}, but transformers has no tensor-parallel plan for the architecture "
            f"{model_config.model_type}; remove tp_size"
        )
    interleaved = [name for name, style in (text.base_model_tp_plan or {}).items() if style.startswith("packed")]
    if sizes.tp > 1 and sizes.ep == 1 and interleaved and num_experts(text):
        raise UserError(
            f"{section}: tp_size is {sizes.tp}, and tensor parallelism does not split the experts of the architecture "
            f"{model_config.model_type}; set ep_size too, such as to {sizes.tp}, or remove tp_size"
        )
    if sizes.ep > 1 and not splits_experts(text):
        kind = "no experts" if not num_experts(text) else "experts that transformers has no plan to split"
        raise UserError(
            f"{section}: ep_size is {sizes.ep}, but the architecture {model_config.model_type} has {kind}; remove "
            "ep_size"
        )

    def tp_fits(size: int) -> bool:
        return heads % size == 0 and kv_heads % size == 0

    def cp_fits(size: int) -> bool:
        local_heads, local_kv_heads = heads // sizes.tp, kv_heads // sizes.tp
        return local_heads % size == 0 and (local_kv_heads % size == 0 or size % local_kv_heads == 0)

    _check(section, "tp_size", sizes.tp, tp_fits, f"{heads} attention heads and {kv_heads} key/value heads", heads)
    if sizes.cp > 1 and not layout.needs_pair_attention:
        raise UserError(
            f"{section}: cp_size is {sizes.cp}, but the layout is {layout.name}, and context parallelism needs packed "
            "rows; remove cp_size, or use layout=shared or layout=packed if the model supports it"
        )
    local = f"{heads // sizes.tp} attention heads and {kv_heads // sizes.tp} key/value heads"
    _check(section, "cp_size", sizes.cp, cp_fits, local + (" per tp rank" if sizes.tp > 1 else ""), heads // sizes.tp)
    if sizes.cp > 1 and not splits_over(model_config, sizes.cp):
        raise UserError(
            f"{section}: cp_size is {sizes.cp}, which does not divide the heads and channels of the layers with state; "
            "remove cp_size, or use a smaller one"
        )
    experts = num_experts(text)
    _check(section, "ep_size", sizes.ep, lambda size: experts % size == 0, f"{experts} experts per layer", experts or 1)
    stages = sizes.pp * settings.virtual_pp_size
    if stages > layers:
        raise UserError(
            f"{section}: pp_size {sizes.pp} with virtual_pp_size {settings.virtual_pp_size} makes {stages} stages, but "
            f"the model has {layers} layers; use at most {layers} stages"
        )


def _check(section: str, name: str, size: int, fits: Callable[[int], bool], what: str, limit: int) -> None:
    if not fits(size):
        valid = ", ".join(str(other) for other in range(1, limit + 1) if fits(other))
        raise UserError(f"{section}: {name} is {size}, but the model has {what}; valid sizes are {valid}")
