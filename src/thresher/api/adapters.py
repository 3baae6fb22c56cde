"""Map a LoraConfig of PEFT to the settings of adapters."""

from __future__ import annotations

from typing import Any

from thresher.config.flat import nest_flat_names
from thresher.config.section import Section
from thresher.errors import UserError
from thresher.models.loading.adapters import default_lora_target
from thresher.models.loading.load import load_model_config

# fields of a LoraConfig that have a setting here, with their names in TRL
_FIELDS = {
    "r": "lora_r",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    "target_modules": "lora_target_modules",
    "use_rslora": "use_rslora",
    "use_dora": "use_dora",
    "modules_to_save": "lora_modules_to_save",
    "target_parameters": "lora_target_parameters",
}
# fields that describe the config or the model, not the adapters
_DESCRIPTIONS = {"task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "inference_mode"}


def adapter_settings(peft_config: Any, model: str, root: type[Section], *, trust_remote_code: bool) -> dict[str, Any]:
    """Return the settings of adapters; a field that is set and has no setting here is an error."""
    kind = type(peft_config).__name__
    if kind != "LoraConfig":
        raise UserError(f"peft_config is a {kind}; adapters are LoRA, so give a peft.LoraConfig")
    if getattr(peft_config.task_type, "value", peft_config.task_type) not in (None, "CAUSAL_LM"):
        raise UserError(f"peft_config.task_type is {peft_config.task_type}; all models are causal language models")
    default = type(peft_config)()
    init = peft_config.init_lora_weights
    is_pissa = isinstance(init, str) and init.startswith("pissa")
    known = _FIELDS.keys() | _DESCRIPTIONS | ({"init_lora_weights"} if is_pissa else set())
    others = [name for name, value in vars(peft_config).items() if name not in known and value != vars(default)[name]]
    if others:
        raise UserError(f"peft_config.{others[0]} has no equivalent; leave it at its default")
    values = {name: value for name, value in vars(peft_config).items() if name in _FIELDS}
    target = values["target_modules"]
    if target is None:
        # PEFT's choice by architecture, where ours would be all linear modules
        target = default_lora_target(load_model_config(model, trust_remote_code=trust_remote_code).model_type)
    if isinstance(target, str) and target != "all-linear":
        raise UserError(f"peft_config.target_modules is the pattern {target!r}; give a list of names, or all-linear")
    values["target_modules"] = [target] if isinstance(target, str) else sorted(target)
    given = {_FIELDS[name]: value for name, value in values.items() if value is not None and value is not False}
    if is_pissa:
        given["lora_init"] = init
    return nest_flat_names(root, {"use_peft": True, **given})
