"""Configs of DeepSpeed and Megatron-Core as configs of fsdp2_train that need the same memory, or more."""

from __future__ import annotations

from typing import Any, NamedTuple

from thresher.config import DPOConfig
from thresher.errors import UserError
from thresher.strategies.deepspeed.declaration import DeepSpeedTrainSettings
from thresher.strategies.megatron.declaration import MegatronSettings


class Translated(NamedTuple):
    """A config to estimate. note: how it differs from what the run does; None if it is the config itself."""

    config: DPOConfig
    note: str | None = None


def as_fsdp2(config: DPOConfig, num_gpus: int) -> Translated:
    """Translate the strategy of the policy; UserError if no config of fsdp2_train is close."""
    name, settings = config.actor_train.strategy_name, config.actor_train.strategy_args.settings
    if name == "fsdp2_train":
        return Translated(config)
    if isinstance(settings, DeepSpeedTrainSettings):
        return _of_deepspeed(config, settings, num_gpus)
    if isinstance(settings, MegatronSettings):
        return _of_megatron(config, settings, num_gpus)
    raise UserError(
        f"plan estimates fsdp2_train, deepspeed_train and megatron_train, and actor_train uses {name}; to estimate the "
        "same axes, set actor_train.strategy_args.strategy_name=fsdp2_train"
    )


def _of_deepspeed(config: DPOConfig, settings: DeepSpeedTrainSettings, num_gpus: int) -> Translated:
    if settings.stage == 1:
        raise UserError(
            "plan has no estimate for DeepSpeed's zero_stage 1, whose gradients are not sharded; use zero_stage 2, "
            "which sends as many bytes"
        )
    strategy: dict[str, Any] = {"dp_replicate": num_gpus} if settings.stage == 0 else {"zero_stage": settings.stage}
    if num_gpus == 1:
        strategy = {}
    words = f"estimated as fsdp2_train with {_words(strategy)}" if strategy else "estimated as fsdp2_train"
    offloaded = [name for name in ("offload_optimizer", "offload_param") if name in settings.zero_options]
    if offloaded:
        words += f"; without {' and '.join(offloaded)}, so that memory is an upper bound"
    return Translated(_with(config, strategy), words)


def _of_megatron(config: DPOConfig, settings: MegatronSettings, num_gpus: int) -> Translated:
    """Replicas: Megatron-Core shards neither weights nor gradients over data-parallel ranks."""
    sizes = settings.sizes
    for name in ("expert_model_parallel_size", "context_parallel_size"):
        if getattr(settings, name) > 1:
            raise UserError(
                f"plan has no estimate for megatron_train with {name} {getattr(settings, name)}: fsdp2_train shards "
                "weights differently there; set it to 1 for a first estimate"
            )
    axes = {"tp_size": sizes.tp, "pp_size": sizes.pp, "virtual_pp_size": sizes.virtual_pp}
    strategy = {name: size for name, size in axes.items() if size > 1}
    replicas = num_gpus // settings.workers_per_data_rank
    if replicas > 1:
        strategy["dp_replicate"] = replicas
    granularity = settings.recompute_granularity or config.actor_train.training_args.gradient_checkpointing
    training = {"gradient_checkpointing": "full" if granularity == "full" else "off"}
    words = f"estimated as fsdp2_train with {_words(strategy)}" if strategy else "estimated as fsdp2_train"
    words += "; the distributed optimizer and sequence parallelism are not counted, so that memory is an upper bound"
    if granularity == "selective":
        words += ", and neither is selective recomputation"
    return Translated(_with(config, strategy, training), words)


def _words(strategy: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in strategy.items())


def _with(config: DPOConfig, strategy: dict[str, Any], training: dict[str, Any] | None = None) -> DPOConfig:
    role = config.actor_train
    given = {"strategy_name": "fsdp2_train", "strategy_config": strategy}
    changed = role.model_copy(
        update={
            "strategy_args": type(role.strategy_args).model_validate(given),
            # neither of them compiles layers
            "training_args": role.training_args.model_copy(update={"torch_compile": False, **(training or {})}),
        }
    )
    return config.model_copy(update={"actor_train": changed})
