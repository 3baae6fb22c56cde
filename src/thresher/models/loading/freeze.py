"""Freeze parts of a model by the prefixes of their parameters' names."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from thresher.errors import UserError

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
