"""Engines of other trainers that exist here: DeepSpeed and Megatron-Core, with their settings."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from thresher.config.strategies import StrategyDeclaration, find_strategy
from thresher.importers.rules import by
from thresher.importers.translation import ENGINE, MODEL, STRATEGY, Rule, Translation

_REFERENCE = "reference.strategy_args."
# names of DeepSpeed files and presets: zero3, ds_z2_offload_config.json, zero3_bf16_cpuoffload_params.json
_STAGE = re.compile(r"(?:zero|stage|(?<![a-z])z)[_-]?([0-3])(?!\d)")
_DIMENSIONS = ("tensor_model", "pipeline_model", "virtual_pipeline_model", "context", "expert_model")
PARALLEL_SIZES = tuple(f"{name}_parallel_size" for name in _DIMENSIONS)
# of Megatron-Core, which a reference on the same workers has too
MEGATRON_SIZES = (*PARALLEL_SIZES, "sequence_parallel")


def find_declared(name: Any) -> StrategyDeclaration | None:
    """Return the declaration of a strategy of another trainer that exists here under the same name."""
    try:
        return find_strategy(name) if isinstance(name, str) else None
    except ValueError:
        return None


def has_reference_model(run: Translation) -> bool:
    """Whether workers load a reference; LoRA uses the policy without its adapter."""
    return run.needs_reference and run.value(f"{MODEL}lora_rank") is None and run.value("reference.mode") != "none"


def megatron(name: str, *neutral: Any) -> Rule:
    """Keep a setting of Megatron-Core, unless it has its neutral value."""

    def function(value: Any, run: Translation) -> None:
        use_megatron(run)
        if any(value is each or value == each for each in (None, *neutral)):
            run.ignore("the default")
        elif name in MEGATRON_SIZES and not run.has_several_devices:
            run.drop(f"does not change the numbers; set {ENGINE}{name} together with device_mapping")
        else:
            set_megatron(run, {name: value})

    return by(function, ENGINE.removesuffix("."))


def use_megatron(run: Translation) -> None:
    """Choose Megatron-Core for the policy, and on several devices for the reference."""
    run.set(f"{STRATEGY}strategy_name", "megatron_train")
    if has_reference_model(run) and run.has_several_devices:
        run.set(f"{_REFERENCE}strategy_name", "megatron_infer")


def set_megatron(run: Translation, settings: Mapping[str, Any]) -> None:
    """Set the settings of the policy, and the sizes of a reference on Megatron-Core."""
    for name, value in settings.items():
        run.set(f"{ENGINE}{name}", value)
        if name in MEGATRON_SIZES and run.value(f"{_REFERENCE}strategy_name") == "megatron_infer":
            run.set(f"{_REFERENCE}strategy_config.{name}", value)


def _read_and_set_deepspeed(value: Any, run: Translation) -> None:
    settings = _read_deepspeed(value)
    if settings is None:
        run.drop("a file that is not here; set strategy_name to deepspeed_train, or keep FSDP2, which shards too")
    else:
        set_deepspeed(run, settings)
        run.note("ZeRO stage and offloading; numbers agree up to rounding")


# an object, a file, or the name of one
DEEPSPEED = by(
    _read_and_set_deepspeed, f"{STRATEGY}strategy_name", ENGINE.removesuffix("."), note="ZeRO stage and offloading"
)


def set_deepspeed(run: Translation, settings: Mapping[str, Any]) -> None:
    """Choose DeepSpeed with these settings; ZeRO-3 also shards the reference."""
    run.set(f"{STRATEGY}strategy_name", "deepspeed_train")
    for name, value in settings.items():
        run.set(f"{ENGINE}{name}", value)
    if settings.get("zero_stage") == 3 and run.has_several_devices and has_reference_model(run):
        run.set(f"{_REFERENCE}strategy_name", "deepspeed_infer")


def _read_deepspeed(value: Any) -> dict[str, Any] | None:
    """Return zero_stage and the offloads of a DeepSpeed config; None if they are not known."""
    if isinstance(value, str):
        content = read_json(value)
        return _by_name(Path(value).stem.lower()) if content is None else _read_deepspeed(content)
    zero = value.get("zero_optimization") or {}
    stage = zero.get("stage", 0)
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        return None
    sections = {name: zero.get(name) for name in ("offload_optimizer", "offload_param")}
    offloads = [name for name, each in sections.items() if isinstance(each, Mapping) and each.get("device") == "cpu"]
    return {"zero_stage": stage, **dict.fromkeys(offloads, True)}


def read_json(name: str) -> dict[str, Any] | None:
    """Read an object from a file, or from the text of one; None if there is none."""
    with suppress(OSError, ValueError):
        content = json.loads(name if name.lstrip().startswith("{") else Path(name).read_text(encoding="utf-8"))
        return content if isinstance(content, dict) else None
    return None


def _by_name(name: str) -> dict[str, Any] | None:
    found = _STAGE.search(name)
    if found is None:
        return None
    stage = int(found[1])
    settings: dict[str, Any] = {"zero_stage": stage}
    if "offload" in name and "param" not in name:
        settings["offload_optimizer"] = True
    if "offload" in name and stage == 3:
        settings["offload_param"] = True
    return settings
