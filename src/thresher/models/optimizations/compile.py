"""torch.compile per layer: layers of one class share one compilation.

Attention stays outside the compiled code (see `pair_attention`), because segments change with every batch.
"""

from __future__ import annotations

from torch import nn

from thresher.models.pipeline_chunk import local_layers


def compile_layers(backbone: nn.Module) -> None:
    """Compile every layer of a decoder for rows of any length."""
    for layer in local_layers(backbone, "training_args.torch_compile", "set torch_compile to false"):
        # dynamic: the number of rows changes with every micro-batch
        layer.compile(dynamic=True)
