"""torch.compile, a layer at a time: each kind of layer is compiled once and serves the whole stack.

Our attention stays outside the compiled code (see `pair_attention`): who sees whom changes with every batch.
"""

from __future__ import annotations

from torch import nn

from thresher.errors import UserError
from thresher.models.chunk import PassBy


def compile_layers(backbone: nn.Module) -> None:
    """Compile every layer of a stack for rows of any length."""
    layers = getattr(backbone, "layers", None)
    if not layers:
        raise UserError(
            f"training_args.torch_compile needs a model that is a stack of layers, and {type(backbone).__name__} keeps "
            "none under `layers`; leave torch_compile out"
        )
    for layer in layers:
        if isinstance(layer, PassBy):
            continue
        # dynamic: every micro-batch has another number of rows
        layer.compile(dynamic=True)
