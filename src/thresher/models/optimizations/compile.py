"""torch.compile per layer: layers of one class share one compilation.

Attention stays outside the compiled code (see `pair_attention`), because segments change with every batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from thresher.models.pipeline_chunk import local_layers


def compile_layers(backbone: nn.Module) -> None:
    """Compile every layer of a decoder for rows of any length."""
    for layer in local_layers(backbone, "training_args.torch_compile", "set torch_compile to false"):
        # dynamic: the number of rows changes with every micro-batch
        layer.compile(dynamic=True)


@contextmanager
def uncompiled_layers(model: nn.Module) -> Iterator[None]:
    """Run compiled layers as they were within a `with` block.

    `torch.compiler.set_stance("force_eager")` would also run attention uncompiled: scores of heads x rows x rows, and
    the start-up check would not cover the kernel that trains.
    """
    compiled = [(module, module._compiled_call_impl) for module in model.modules() if module._compiled_call_impl]
    for module, _ in compiled:
        module._compiled_call_impl = None
    try:
        yield
    finally:
        for module, call in compiled:
            module._compiled_call_impl = call
