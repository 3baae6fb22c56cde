"""torch.compile, a layer at a time: each kind of layer is compiled once and serves the whole stack.

Our attention stays outside the compiled code (see `pair_attention`): who sees whom changes with every batch.
"""

from __future__ import annotations

from torch import nn

from thresher.models.pipeline_chunk import own_layers


def compile_layers(backbone: nn.Module) -> None:
    """Compile every layer of a stack for rows of any length."""
    for layer in own_layers(backbone, "training_args.torch_compile", "leave torch_compile out"):
        # dynamic: every micro-batch has another number of rows
        layer.compile(dynamic=True)
