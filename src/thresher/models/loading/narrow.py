"""Frozen matrices under an adapter, stored in the precision of their products.

autocast would round each of them to it in every forward. A frozen matrix never changes, so that a rounded copy gives
the same products bit by bit, in half the memory. Embedding, head, norms and biases, which are not rounded everywhere,
keep the precision of the model; adapters too, which are trained.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


def narrow_frozen_matrices(decoder: nn.Module, dtype: torch.dtype) -> None:
    """Store the frozen matrices of the layers of a decoder in a precision; they may be on the meta device."""
    for layer in getattr(decoder, "layers", ()):
        for module in _frozen(layer):
            if dtype.itemsize < module.weight.dtype.itemsize:
                module.weight = nn.Parameter(module.weight.detach().to(dtype), requires_grad=False)


def widest_dtype(model: nn.Module) -> torch.dtype:
    """Precision of the parameters of a model that are not narrowed."""
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
    linear = [module for module in layer.modules() if isinstance(module, nn.Linear)]
    return [module for module in linear if not module.weight.requires_grad]
