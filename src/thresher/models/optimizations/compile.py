"""torch.compile per layer: layers of one class share one compilation.

Attention stays outside the compiled code (see `pair_attention`), because segments change with every batch. Where a
layer also sends messages between its matrices, is a part of a pipeline, or keeps some of its results for the backward,
its elementwise functions are compiled one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from thresher.errors import UserError
from thresher.models.optimizations.llama_layers import COMPILED, elementwise_function
from thresher.models.pipeline_chunk import local_layers

_SETTING, _HINT = "actor_train.training_args.torch_compile", "set torch_compile to false"
# variants differ in gradients, in windows and in the rows that the last layer keeps. torch would stop at 8: it logs a
# warning then, and runs further ones uncompiled
MAX_COMPILED_VARIANTS = 32


@dataclass(frozen=True)
class Compilation:
    """What to compile: whole layers, or their elementwise functions."""

    parts: Literal["layers", "functions"]
    is_optional: bool = False  # skip models that have none

    def apply(self, backbone: nn.Module) -> None:
        if self.is_optional and not getattr(backbone, "layers", None):
            return
        if self.parts == "layers":
            compile_layers(backbone)
        elif not compile_elementwise(backbone) and not self.is_optional:
            raise UserError(
                f"{_SETTING} compiles only norms and activations of Llama-like layers with pipelines, context, "
                f"expert or sequence parallelism or selective recomputation, and this model has none of them; {_HINT}"
            )


def compile_layers(backbone: nn.Module) -> None:
    """Compile every decoder layer for rows of any length."""
    for layer in local_layers(backbone, _SETTING, _HINT):
        # dynamic: the number of rows changes with every micro-batch
        layer.compile(dynamic=True, recompile_limit=MAX_COMPILED_VARIANTS)
        layer._compiled_call_impl = _translate_errors(layer._compiled_call_impl)


def _translate_errors(compiled: Any) -> Callable[..., Any]:
    """Let a compiled call raise a UserError if the compiler fails."""
    from torch._dynamo.exc import BackendCompilerFailed  # slow to import

    def call(*args: Any, **settings: Any) -> Any:
        try:
            return compiled(*args, **settings)
        except BackendCompilerFailed as error:
            reason = str(error.inner_exception).strip().partition("\n")[0] or type(error.inner_exception).__name__
            raise UserError(
                f"torch cannot compile the layers of this model ({reason}); set {_SETTING}=false"
            ) from error

    return call


def compile_elementwise(backbone: nn.Module) -> int:
    """Compile the norms and activations of Llama-like layers, and leave what is between them; return their number."""
    modules = [module for layer in local_layers(backbone, _SETTING, _HINT) for module in layer.modules()]
    functions = {module: function for module in modules if (function := elementwise_function(module)) is not None}
    compiled = {
        function: _translate_errors(torch.compile(function, dynamic=True)) for function in set(functions.values())
    }
    for module, function in functions.items():
        setattr(module, COMPILED, compiled[function])
    return len(functions)


@contextmanager
def uncompiled_layers(model: nn.Module) -> Iterator[None]:
    """Run compiled layers as they were within a `with` block.

    `torch.compiler.set_stance("force_eager")` would also run attention uncompiled: scores of heads x rows x rows, and
    the start-up check would not cover the kernel that trains.
    """
    compiled = [(module, module._compiled_call_impl) for module in model.modules() if module._compiled_call_impl]
    functions = [(module, vars(module).pop(COMPILED)) for module in model.modules() if COMPILED in vars(module)]
    for module, _ in compiled:
        module._compiled_call_impl = None
    try:
        yield
    finally:
        for module, call in compiled:
            module._compiled_call_impl = call
        for module, function in functions:
            setattr(module, COMPILED, function)
