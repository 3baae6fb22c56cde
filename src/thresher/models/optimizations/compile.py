"""torch.compile per layer: layers of one class share one compilation.

Attention stays outside the compiled code (see `pair_attention`), because segments change with every batch. Where a
layer also sends messages between its matrices, is a part of a pipeline, or keeps some of its results for the backward,
its elementwise functions are compiled one by one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor, nn

from thresher.errors import UserError
from thresher.models.optimizations.llama_layers import COMPILED, elementwise_function
from thresher.models.pipeline_chunk import local_layers

logger = logging.getLogger(__name__)

_SETTING, _HINT = "actor_train.training_args.torch_compile", "set torch_compile to false"
# variants differ in gradients, in windows and in the rows that the last layer keeps; torch would stop at 8
MAX_COMPILED_VARIANTS = 32


@dataclass(frozen=True)
class Compilation:
    """What to compile: whole layers, or their elementwise functions.

    is_optional: Skip models that have none, and run uncompiled what the compiler cannot compile, with a warning.
    """

    parts: Literal["layers", "functions"]
    is_optional: bool = False

    def apply(self, backbone: nn.Module) -> None:
        if self.is_optional and not getattr(backbone, "layers", None):
            return
        if self.parts == "layers":
            compile_layers(backbone, is_optional=self.is_optional)
        elif not compile_elementwise(backbone, is_optional=self.is_optional) and not self.is_optional:
            raise UserError(
                f"{_SETTING} compiles only norms and activations of Llama-like layers with pipelines, context, "
                f"expert or tensor parallelism or selective recomputation, and this model has none of them; {_HINT}"
            )


def compile_layers(backbone: nn.Module, *, is_optional: bool = False) -> None:
    """Compile every decoder layer for rows of any length."""
    for layer in local_layers(backbone, _SETTING, _HINT):
        layer.compile(**_settings(is_optional=is_optional))
        layer._compiled_call_impl = _handle_errors(layer._compiled_call_impl, is_optional=is_optional)


def compile_elementwise(backbone: nn.Module, *, is_optional: bool = False) -> int:
    """Compile the norms and activations of Llama-like layers, and leave what is between them; return their number."""
    modules = [module for layer in local_layers(backbone, _SETTING, _HINT) for module in layer.modules()]
    functions = {module: function for module in modules if (function := elementwise_function(module)) is not None}
    settings = _settings(is_optional=is_optional)
    compiled = {
        function: _handle_errors(torch.compile(function, **settings), is_optional=is_optional)
        for function in {*functions.values()}
    }
    for module, function in functions.items():
        setattr(module, COMPILED, compiled[function])
    return len(functions)


def _settings(*, is_optional: bool) -> dict[str, Any]:
    """Arguments of torch.compile, the same objects for all layers, which share what is compiled."""
    dynamo_logger = logging.getLogger("torch._dynamo.convert_frame")
    if _report not in dynamo_logger.filters:
        dynamo_logger.addFilter(_report)
    # dynamic: the number of rows changes with every micro-batch
    settings: dict[str, Any] = {"dynamic": True, "recompile_limit": MAX_COMPILED_VARIANTS}
    return settings | {"backend": _inductor_or_eager} if is_optional else settings


def _report(record: logging.LogRecord) -> bool:
    """Report in the run's log what torch logs once per function and only for itself."""
    message = record.getMessage()
    if "WON'T CONVERT" in message and record.exc_info and isinstance(record.exc_info[1], Exception):
        _warn_once(_reason(record.exc_info[1]))
    if "recompile_limit" in message:
        logger.warning(
            "a compiled layer has more than %d variants; further ones run uncompiled, which is slower; set %s=false to "
            "compile none, and report this with the reason in a run with TORCH_LOGS=recompiles",
            MAX_COMPILED_VARIANTS,
            _SETTING,
        )
    return True


def _inductor_or_eager(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
    """Compile a part of a layer; if that fails, let the part run as it is."""
    from torch._dynamo import lookup_backend  # slow to import
    from torch._dynamo.exc import RestartAnalysis, SkipFrame
    from torch._functorch import config

    compiled: Callable[..., Any]
    try:
        # else a backward that fails to compile would do so again, and raise, in the run's backward
        with config.patch(force_non_lazy_backward_lowering=True):
            compiled = lookup_backend("inductor")(graph, inputs)
    except (RestartAnalysis, SkipFrame):  # requests to trace the part again, or not at all
        raise
    except Exception as error:  # of a compiler, which may fail in any way
        _warn_once(_reason(error))
        compiled = graph.forward
    return compiled


@cache
def _warn_once(reason: str) -> None:
    logger.warning(
        "torch cannot compile a part of the layers (%s); it runs uncompiled, which is slower; install gcc if no "
        "compiler is there, or set %s=false to compile none",
        reason,
        _SETTING,
    )


def _reason(error: Exception) -> str:
    cause = getattr(error, "inner_exception", error)
    return str(cause).strip().partition("\n")[0] or type(cause).__name__


def _handle_errors(compiled: Any, *, is_optional: bool) -> Callable[..., Any]:
    """Let a compiled call raise a UserError if the compiler fails, or run what cannot be traced uncompiled."""
    from torch._dynamo import config  # slow to import
    from torch._dynamo.exc import BackendCompilerFailed, InternalTorchDynamoError

    def call(*args: Any, **settings: Any) -> Any:
        suppressed = config.suppress_errors
        # not of FlexAttention: torch suppresses no error with fullgraph; `config.patch` is slow, and each layer calls
        config.suppress_errors = is_optional or suppressed
        try:
            return compiled(*args, **settings)
        except (BackendCompilerFailed, InternalTorchDynamoError) as error:
            raise UserError(
                f"torch cannot compile the layers of this model ({_reason(error)}); set {_SETTING}=false"
            ) from error
        finally:
            config.suppress_errors = suppressed

    return call


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
