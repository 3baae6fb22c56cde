"""Settings of other trainers that have no key here yet, in one place.

When the key exists, name it as the target: every table that uses the setting then applies it.
"""

from __future__ import annotations

from typing import NamedTuple


class Planned(NamedTuple):
    """A setting: why it has no equivalent, and the key here once there is one."""

    reason: str
    target: str | None = None


PLANNED = {
    "fp16": Planned("fp16 needs loss scaling, which is not implemented; bf16 or fp32 is used"),
    "quantization": Planned("quantized base weights (QLoRA) are not supported; LoRA on full-precision weights is used"),
    "named_template": Planned("there is no template of this name here; the tokenizer's own template is used"),
    "revision": Planned("a revision of a model or data set cannot be chosen; download it and give its directory"),
    "validation_split": Planned("a share of the training data cannot be held out; give a file of validation pairs"),
    "eval_steps by epoch": Planned("evaluations are counted in steps; set eval_steps"),
    "save_steps by epoch": Planned("checkpoints are counted in steps; set save_steps"),
    "mixing": Planned("data sets cannot be weighted or sampled; every row of every file is used once per epoch"),
    "max_samples": Planned("the number of rows per file cannot be limited; cut the file"),
    "loss_on_prompt": Planned("tokens of the prompt cannot be scored"),
    "tokenizer": Planned("the tokenizer is read from the model's directory; copy the tokenizer's files there"),
    "adapter": Planned("training cannot start from a LoRA adapter; merge it into the model first"),
    "pissa": Planned("LoRA starts from zero; other initializations are not supported"),
    "dora": Planned("DoRA is not supported; plain LoRA is used"),
    "trained_modules": Planned("modules beside the LoRA adapters cannot be trained"),
    "moe_aux_loss": Planned("the router's auxiliary loss is not added"),
    "freeze": Planned("parameters cannot be frozen"),
    "kto": Planned("there is no KTO loss; labelled rows are joined into pairs, and the loss is left to you"),
    "system_prompt": Planned("a default system message cannot be set; add a `system` column to the rows"),
}
