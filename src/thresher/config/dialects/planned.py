"""Settings of other trainers that have no key here yet, in one place.

When the key exists, name it as the target: every table that uses the setting then applies it.
"""

from __future__ import annotations

from typing import NamedTuple

_MODEL = "actor_train.model_args."


class Planned(NamedTuple):
    """A setting: why it has no equivalent, and the key here once there is one."""

    reason: str
    target: str | None = None


PLANNED = {
    "quantization": Planned("quantized base weights (QLoRA) are not supported; LoRA on full-precision weights is used"),
    "named_template": Planned("there is no template of this name here; the tokenizer's own template is used"),
    "revision": Planned("a revision of a model", f"{_MODEL}revision"),
    "mixing": Planned("data sets cannot be weighted or sampled; every row of every file is used once per epoch"),
    "max_samples": Planned("", "actor_train.data_args.max_samples"),
    "adapter": Planned("the reference cannot have an adapter of its own; merge it into the reference model first"),
    "lora_init": Planned("LoRA starts at zero or with PiSSA; other initializations are not supported"),
    "dora": Planned("DoRA is not supported; plain LoRA is used"),
    "trained_modules": Planned("modules beside the LoRA adapters cannot be trained"),
    "moe_aux_loss": Planned("the router's auxiliary loss", f"{_MODEL}moe_aux_loss_coef"),
    "freeze": Planned("parameters are frozen by the prefixes of their names only; set freeze_module_prefix"),
    "kto": Planned("there is no KTO loss; labelled rows are joined into pairs, and the loss is left to you"),
    "system_prompt": Planned("", "actor_train.data_args.system_prompt"),
}
