"""Checks that Megatron-Core supports a model and the settings of a run, before any worker starts."""

from __future__ import annotations

from thresher.errors import UserError
from thresher.models.loading.weight_files import find_files_to_shard
from thresher.strategies.megatron.transformer_config import check_sizes, describe_model
from thresher.strategies.spec import StrategyCheck


def check(run: StrategyCheck) -> None:
    """Reject what Megatron-Core cannot compute as the other engines do."""
    settings, model = run.settings, describe_model(run.model_config, run.path)
    find_files_to_shard(run.path)
    check_sizes(model, settings.sizes, run.path)
    _check_precision(run)
    if run.router_loss_coef:
        raise UserError(
            "actor_train.model_args.moe_aux_loss_coef is not supported by megatron_train; remove it or use fsdp2_train"
        )
    if run.training.get("activation_offload"):
        raise UserError(
            "training_args.activation_offload is not supported by the megatron strategies; remove it or use fsdp2_train"
        )
    if run.compiles:
        raise UserError("training_args.torch_compile is not supported by the megatron strategies; remove it")
    if run.is_synced:
        raise UserError(
            "reference.sync_steps lets the reference follow the policy, which the megatron strategies do not support; "
            "remove it or use fsdp2_train"
        )
    if settings.context_parallel_size > 1 and not run.layout.needs_pair_attention:
        raise UserError(
            f"{run.section}: context_parallel_size is {settings.context_parallel_size}, but the layout is "
            f"{run.layout.name}, and context parallelism needs packed rows; remove context_parallel_size, or use "
            "layout=shared or layout=packed"
        )
    if run.trained is not None and run.trained.has_adapter:
        _check_adapters(run, model.shape.num_kv_heads)


def _check_precision(run: StrategyCheck) -> None:
    settings, section = run.settings, run.section
    for name in ("bf16", "fp16"):
        given = getattr(settings, name)
        if given is not None and given != (run.dtype == name):
            raise UserError(
                f"{section}: strategy_config.{name} is {str(given).lower()}, but model_args.dtype is {run.dtype}; "
                f"remove {name}, which follows from dtype"
            )
    if run.trained is not None and run.master_dtype != "fp32":
        raise UserError(
            f"{section}.model_args.master_dtype is {run.master_dtype}, but megatron_train always updates fp32 weights; "
            "set it to fp32"
        )
    if run.master_dtype not in ("fp32", run.dtype):
        raise UserError(
            f"{section}: weights are stored in {run.master_dtype} and computed in {run.dtype}, and Megatron-Core has "
            f"one precision for both; set master_dtype to fp32 or {run.dtype}"
        )


def _check_adapters(run: StrategyCheck, num_kv_heads: int) -> None:
    trained, tp_size = run.trained, run.settings.tensor_model_parallel_size
    assert trained is not None  # noqa: S101
    if trained.lora_dropout:
        raise UserError("actor_train.model_args.lora_dropout is not supported by megatron_train; set it to 0")
    if trained.lora is not None and trained.lora.starts_from_weights:
        raise UserError(
            f"actor_train.model_args.lora_init {trained.lora.init} decomposes whole weight matrices, which "
            "megatron_train shards; use lora_init=default"
        )
    if num_kv_heads % tp_size:
        raise UserError(
            f"LoRA needs a tensor_model_parallel_size that divides the {num_kv_heads} key/value heads, and it is "
            f"{tp_size}; use a smaller one"
        )
