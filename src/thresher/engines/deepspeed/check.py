"""DeepSpeed's checks before any worker starts: the model, and a DeepSpeed JSON of the user."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import isclose, isinf
from typing import Any

from thresher.engines.deepspeed.declaration import AUTO, ZeroSettings
from thresher.engines.native.check import check_router_family
from thresher.engines.spec import ModelSpec
from thresher.errors import UserError
from thresher.models.loading.weight_files import check_shardable

_CONFIG = "strategy_args.strategy_config"
# DeepSpeed's key -> thresher's key below training_args
_SAME_SETTINGS = {
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "max_grad_norm",
}
_ADAMW = {
    "lr": ("learning_rate",),
    "betas": ("adam_beta1", "adam_beta2"),
    "eps": ("adam_epsilon",),
    "weight_decay": ("weight_decay",),
}


def check(spec: ModelSpec[ZeroSettings]) -> None:
    """Reject what the engine does not support, and keys of a DeepSpeed JSON that contradict thresher's."""
    stage = spec.settings.stage
    spec.require_adamw("DeepSpeed")
    if spec.compiles:
        raise UserError(
            f"{spec.section}: training_args.torch_compile is not supported by DeepSpeed; set it to false, or "
            "use fsdp2_train"
        )
    if spec.is_synced:
        raise UserError(
            f"{spec.section}: reference.sync_steps is not supported by DeepSpeed, whose reference cannot "
            "follow the policy; remove it, or use fsdp2_train"
        )
    if spec.master_dtype != "fp32":
        raise UserError(
            f"{spec.section}: model_args.master_dtype {spec.master_dtype} is not supported by DeepSpeed, "
            "which keeps weights in fp32; set it to fp32, and model_args.dtype to the precision to compute in"
        )
    if spec.balances_experts:
        check_router_family(spec)
    lora = spec.trained.lora
    if lora is not None and lora.starts_from_weights and stage == 3:
        raise UserError(
            f"actor_train.model_args.lora_init {lora.init} decomposes whole weight matrices, which zero_stage 3 "
            "partitions; use zero_stage 2, or lora_init=default"
        )
    if stage == 3:
        spec.require_plain_adapters("zero_stage 3", "use zero_stage 2")
        check_shardable(spec.path)
    for key, value, thresher_key, expected in _shared_settings(spec):
        if not _agrees(value, expected):
            raise UserError(
                f"{spec.section}.{_CONFIG}.{key} is {value}, but {thresher_key} is {expected}; set {thresher_key}, and "
                f'set {key} to "auto"'
            )


def _shared_settings(spec: ModelSpec[ZeroSettings]) -> Iterator[tuple[str, Any, str, object]]:
    """Yield DeepSpeed's key and value, and thresher's key and value, for each setting that both have."""
    settings, training = spec.settings, spec.training
    for key, name in _SAME_SETTINGS.items():
        yield key, getattr(settings, key), f"training_args.{name}", getattr(training, name)
    yield "train_batch_size", settings.train_batch_size, "the number of pairs per step", spec.pairs_per_step
    for name in ("bf16", "fp16"):
        section = _section(spec, name)
        yield f"{name}.enabled", section.get("enabled", AUTO), "model_args.dtype == " + name, spec.dtype == name
    if spec.dtype == "fp16":
        fp16 = _section(spec, "fp16")
        yield "fp16.loss_scale", fp16.get("loss_scale", AUTO), "the loss scale, which is dynamic,", 0
        for name in ("initial_scale_power", "loss_scale_window"):
            yield f"fp16.{name}", fp16.get(name, AUTO), f"training_args.{name}", getattr(training, name)
    optimizer = _section(spec, "optimizer")
    kind = optimizer.get("type", AUTO)
    yield "optimizer.type", kind if kind == AUTO else str(kind).lower(), "the optimizer", "adamw"
    for name, value in (optimizer.get("params") or {}).items():
        if name not in _ADAMW:
            yield f"optimizer.params.{name}", value, "a setting of AdamW of this name", "not known"
            continue
        expected = [getattr(training, key) for key in _ADAMW[name]]
        thresher_key = " and ".join(f"training_args.{key}" for key in _ADAMW[name])
        yield f"optimizer.params.{name}", value, thresher_key, expected if len(expected) > 1 else expected[0]
    scheduler = _section(spec, "scheduler")
    scheduled = {"type": scheduler.get("type", AUTO), **(scheduler.get("params") or {})}
    for name, value in scheduled.items():
        key = "scheduler.type" if name == "type" else f"scheduler.params.{name}"
        yield key, value, "training_args.lr_scheduler_type", training.lr_scheduler_type
    printed = settings.steps_per_print
    is_never = printed is None or (isinstance(printed, float) and isinf(printed)) or str(printed) in ("inf", ".inf")
    yield "steps_per_print", AUTO if is_never else printed, "the progress line of DeepSpeed", "left out"


def _section(spec: ModelSpec[ZeroSettings], name: str) -> Mapping[str, Any]:
    value = getattr(spec.settings, name)
    if value == AUTO:
        return {}
    if not isinstance(value, Mapping):
        raise UserError(f'{spec.section}.{_CONFIG}.{name} is {value!r}; use a section with keys, or "auto"')
    return value


def _agrees(value: Any, expected: Any) -> bool:
    """Whether a value of DeepSpeed leaves a setting to thresher, or equals it."""
    if value == AUTO:
        return True
    if isinstance(value, bool) or isinstance(expected, bool | str):
        return bool(value == expected)
    if isinstance(expected, list):
        is_list = isinstance(value, list) and len(value) == len(expected)
        return is_list and all(_agrees(one, other) for one, other in zip(value, expected, strict=True))
    return isinstance(value, int | float) and isclose(value, expected, rel_tol=1e-12)
