"""LoRA adapters by PEFT: attach, switch off for the reference, merge for export."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from thresher.errors import UserError


def attach_lora(
    model: PreTrainedModel, *, rank: int, alpha: float | None, dropout: float, target: Sequence[str]
) -> nn.Module:
    """Freeze a model and add trainable adapters; the initial adapter leaves every output as it was."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=rank,
        lora_alpha=2 * rank if alpha is None else alpha,
        lora_dropout=dropout,
        target_modules="all-linear" if list(target) == ["all-linear"] else list(target),
        task_type="CAUSAL_LM",
    )
    try:
        adapted: nn.Module = get_peft_model(model, config)
    except ValueError as error:
        linear = sorted({name.rpartition(".")[2] for name, m in model.named_modules() if isinstance(m, nn.Linear)})
        raise UserError(
            f"lora_target {list(target)} matches nothing in this model; its linear modules are {', '.join(linear)}"
        ) from error
    # the log-probabilities read the head's weight directly, so an adapter on it would never be trained
    if any("lora_" in name for name, _ in model.get_output_embeddings().named_parameters()):
        raise UserError(f"lora_target {list(target)} reaches the LM head, which takes no adapter; leave it out")
    return adapted


def without_adapter(model: Any) -> AbstractContextManager[None]:
    """Give the exact base model for the length of a `with` block."""
    context: AbstractContextManager[None] = model.disable_adapter()
    return context


def merged(model: Any) -> PreTrainedModel:
    """Fold the adapters into the base weights."""
    plain: PreTrainedModel = model.merge_and_unload()
    return plain
