"""LoRA adapters with PEFT: attach, disable for the reference, merge for export."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from thresher.distributed.sharded_tensor import local_slices, to_local
from thresher.errors import UserError
from thresher.models.loading.adapter_files import AdapterFiles


def attach_lora(
    model: PreTrainedModel,
    *,
    rank: int,
    alpha: float | None,
    dropout: float,
    target: Sequence[str],
    init: str = "default",
) -> nn.Module:
    """Freeze a model and add trainable adapters; `init_adapters` sets their values.

    init: `pissa` or `pissa_niter_N` moves the principal components of the weights into the adapters (2404.02948). The
    same weights give the same components, so a checkpoint of the adapters needs no copy of the rest.
    """
    from peft import LoraConfig

    names = [name for name, _ in model.named_modules()]
    # PEFT is content if one target matches; another, misspelled one would be left untrained
    unmatched = [each for each in target if not any(f".{name}".endswith(f".{each}") for name in names)]
    if unmatched and list(target) != ["all-linear"]:
        raise UserError(_matches_nothing(model, unmatched))
    config = LoraConfig(
        r=rank,
        lora_alpha=2 * rank if alpha is None else alpha,
        lora_dropout=dropout,
        target_modules="all-linear" if list(target) == ["all-linear"] else list(target),
        task_type="CAUSAL_LM",
        init_lora_weights=True if init == "default" or next(model.parameters()).is_meta else init,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # for pissa_niter_N, which draws a random subspace
        return _attach(model, config, target)


def attach_adapter(model: PreTrainedModel, adapter: AdapterFiles, *, dropout: float = 0.0) -> nn.Module:
    """Freeze a model and add the trainable modules of an adapter on disk; `AdapterFiles.load` sets their values."""
    from peft import LoraConfig

    config = LoraConfig(**adapter.settings, lora_dropout=dropout, task_type="CAUSAL_LM")
    return _attach(model, config, [str(adapter.settings.get("target_modules"))])


def _attach(model: PreTrainedModel, config: Any, target: Sequence[str]) -> nn.Module:
    from peft import get_peft_model

    try:
        is_on_meta = next(model.parameters()).is_meta
        adapted: nn.Module = get_peft_model(model, config, low_cpu_mem_usage=is_on_meta)
    except ValueError as error:
        raise UserError(_matches_nothing(model, target)) from error
    # logps use the head's weight directly, so an adapter on it would never be trained
    if any("lora_" in name for name, _ in model.get_output_embeddings().named_parameters()):
        raise UserError(f"lora_target {list(target)} matches the LM head, which cannot have an adapter; exclude it")
    return adapted


def default_lora_target(model_type: str) -> list[str]:
    """The modules that PEFT gives adapters in a family of models if none are named."""
    from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as DEFAULTS

    if model_type not in DEFAULTS:
        raise UserError(f"PEFT has no default target_modules for {model_type} models; name them, or use all-linear")
    return list(DEFAULTS[model_type])


def _matches_nothing(model: nn.Module, target: Sequence[str]) -> str:
    linear = sorted({name.rpartition(".")[2] for name, m in model.named_modules() if isinstance(m, nn.Linear)})
    return f"lora_target {list(target)} matches nothing in this model; its linear modules are {', '.join(linear)}"


@torch.no_grad()
def init_adapters(model: nn.Module, seed: int) -> None:
    """Initialize adapters so that the initial output equals the base model's.

    The random generator of each tensor is seeded by its name, so that values do not depend on how the model is sharded.
    """
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            to_local(parameter).copy_(initial_values(name, parameter.shape, seed)[local_slices(parameter)])


def initial_values(name: str, shape: Sequence[int], seed: int) -> Tensor:
    """Initial values of a full tensor of an adapter; name: in the transformers model."""
    # one factor is zero: B, but A of an embedding, as in PEFT
    if ".lora_B." in name or ".lora_embedding_A." in name:
        return torch.zeros(shape)
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8]) >> 1)
    # uniform in +-1/sqrt(inputs), as PEFT draws A; it draws B of an embedding from N(0, 1), whatever its width
    return nn.init.kaiming_uniform_(torch.empty(shape), a=math.sqrt(5), generator=generator)


def adapter_disabled(model: Any) -> AbstractContextManager[None]:
    """Use the exact base model within a `with` block."""
    context: AbstractContextManager[None] = model.disable_adapter()
    return context


def merge_adapter(model: Any) -> PreTrainedModel:
    """Merge the adapters into the base weights; an LM head that is tied to an adapted embedding becomes untied."""
    base: Any = model.get_base_model()
    embedding, head = base.get_input_embeddings(), base.get_output_embeddings()
    is_adapted = any("lora_" in name for name, _ in embedding.named_parameters())
    if is_adapted and embedding.weight is head.weight:
        # the adapter changes the embedding only; merged into the shared weight, it would change the head too
        head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)
        base.config.get_text_config().tie_word_embeddings = base.config.tie_word_embeddings = False
    merged: PreTrainedModel = model.merge_and_unload()
    return merged
