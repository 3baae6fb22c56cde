"""What of a model is trained: all weights, all but frozen modules, or LoRA adapters above narrowed matrices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from thresher.errors import UserError
from thresher.models.loading.adapters import AdapterFiles, LoraSettings, attach_adapter, attach_lora, init_adapters
from thresher.models.pipeline_chunk import decoder_of, head_of
from thresher.models.router import routers


@dataclass(frozen=True)
class TrainedParts:
    """The trained part of a model: an adapter, or the weights themselves."""

    lora: LoraSettings | None = None  # a new adapter
    adapter: AdapterFiles | None = None  # one on disk
    lora_dropout: float = 0.0
    frozen_prefixes: Sequence[str] = ()

    @property
    def has_adapter(self) -> bool:
        return self.lora is not None or self.adapter is not None

    def apply(self, model: PreTrainedModel, frozen_dtype: torch.dtype | None = None) -> nn.Module:
        """Add adapters, with frozen matrices in `frozen_dtype`, or freeze the named modules; on the meta device too."""
        if self.frozen_prefixes:
            freeze_modules(model, self.frozen_prefixes)
        is_reward_model = hasattr(model, "score")
        if is_reward_model and not head_of(model).weight.requires_grad:
            raise UserError(
                f"freeze_module_prefix {list(self.frozen_prefixes)} freezes the head of the reward model; remove the "
                "name that matches `score`"
            )
        if self.adapter is not None:
            module = attach_adapter(model, self.adapter, dropout=self.lora_dropout)
        elif self.lora is not None:
            module = attach_lora(model, self.lora, dropout=self.lora_dropout)
        else:
            return model
        if is_reward_model:
            if hasattr(head_of(model), "original_module"):
                raise UserError(
                    "modules_to_save names the head of the reward model, which is trained anyway; remove it"
                )
            head_of(model).requires_grad_(True)
        if frozen_dtype is not None:
            narrow_frozen_matrices(decoder_of(model), frozen_dtype)
        return module

    def init(self, model: PreTrainedModel, seed: int) -> None:
        """Set the adapters' initial values; the model has its weights."""
        if self.adapter is not None:
            self.adapter.load(model)
        elif self.lora is not None:
            init_adapters(model, seed, keeps_factors=self.lora.starts_from_weights)


_NAMES_SHOWN = 12


def freeze_modules(model: nn.Module, prefixes: Sequence[str]) -> None:
    """Take the gradient from parameters whose name starts with a prefix; a tied one has several names."""
    named = list(model.named_parameters(remove_duplicate=False))
    if unmatched := [prefix for prefix in prefixes if not any(name.startswith(prefix) for name, _ in named)]:
        raise UserError(
            f"freeze_module_prefix {unmatched} matches no parameter of this model; its modules are {_modules(model)}"
        )
    for name, parameter in named:
        if name.startswith(tuple(prefixes)):
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserError(
            f"freeze_module_prefix {list(prefixes)} freezes every parameter, so nothing is trained; name fewer modules "
            f"of {_modules(model)}"
        )


def _modules(model: nn.Module) -> str:
    """Names of modules with parameters, down to the single layers."""
    names = dict.fromkeys(
        ".".join(name.split(".")[: 3 if ".layers." in f".{name}" else 2]).removesuffix(".weight").removesuffix(".bias")
        for name, _ in model.named_parameters(remove_duplicate=False)
    )
    shown = list(names)
    if len(shown) > _NAMES_SHOWN:
        shown[_NAMES_SHOWN // 2 : -_NAMES_SHOWN // 2] = ["..."]
    return ", ".join(shown)


def narrow_frozen_matrices(decoder: nn.Module, dtype: torch.dtype) -> None:
    """Store the frozen matrices of a decoder's layers in the precision of their products.

    autocast would round each of them to it in every forward. A frozen matrix never changes, so a rounded copy gives the
    same products bit by bit, in half the memory. Embedding, head, routers, norms and biases, which are not rounded
    everywhere, keep the precision of the model; so do adapters, which are trained. The model may be on the meta device.
    """
    for layer in getattr(decoder, "layers", ()):
        for module in _frozen(layer):
            if dtype.itemsize < module.weight.dtype.itemsize:
                module.weight = nn.Parameter(module.weight.detach().to(dtype), requires_grad=False)


def widest_dtype(model: nn.Module) -> torch.dtype:
    """Precision of the parameters that are not narrowed."""
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    return max(dtypes, key=lambda dtype: dtype.itemsize)


@contextmanager
def widened_matrices(decoder: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Within a `with` block, let each layer compute with copies of its frozen matrices in a wider precision."""
    narrow: dict[nn.Linear, Any] = {}

    def widen(layer: nn.Module, _args: Any) -> None:
        for module in _frozen(layer):
            if module.weight.dtype != dtype:
                narrow[module] = module.weight
                module.weight = nn.Parameter(module.weight.detach().to(dtype), requires_grad=False)

    def restore(*_call: Any) -> None:
        for module, weight in narrow.items():
            module.weight = weight
        narrow.clear()

    handles: list[Any] = []
    for layer in getattr(decoder, "layers", ()):
        handles += [layer.register_forward_pre_hook(widen), layer.register_forward_hook(restore)]
    try:
        yield
    finally:
        restore()
        for handle in handles:
            handle.remove()


def _frozen(layer: nn.Module) -> list[nn.Linear]:
    kept = set(routers(layer))
    # not what a trained copy starts from: the copy would start with rounded values
    kept |= {part for module in layer.modules() if hasattr(module, "original_module") for part in module.modules()}
    linear = [module for module in layer.modules() if isinstance(module, nn.Linear) and module not in kept]
    # quantized ones are neither narrowed nor widened
    return [m for m in linear if not m.weight.requires_grad and m.weight.is_floating_point()]
