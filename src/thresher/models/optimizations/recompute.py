"""Gradient checkpointing: what a layer keeps of its forward for the backward, and what it computes again.

`full` keeps the input of a layer. `selective` also keeps what costs most to compute per byte: products with a weight
matrix (2 x inner dimension FLOPs per element), attention, and sums over processes. Norms, rotary embeddings and
activations are computed again. So are:

- a product of partial sums: the sum over processes is kept instead,
- the last product of a layer, which no backward reads,
- products with a narrow inner dimension, such as the second matrix of an adapter,
- the gathered rows of sequence parallelism, as many times larger than a process's own rows as there are processes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers import PreTrainedModel

from thresher.models.optimizations.llama_layers import is_llama_like
from thresher.models.pipeline_chunk import IdentityModule, decoder_of

Recompute = Literal["off", "selective", "full"]

_aten, _collectives = torch.ops.aten, torch.ops._c10d_functional
_PRODUCTS = {_aten.mm.default, _aten.addmm.default, _aten._grouped_mm.default}
_KEPT = {
    _collectives.all_reduce.default,
    _collectives.reduce_scatter_tensor.default,
    _collectives.all_to_all_single.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
}
# attention kernels that are single operations; and compiled code, which is FlexAttention's in an uncompiled layer
_KEPT_NAMESPACES = ("thresher", "torch_attn", "flash_attn", "flash_attn_3")
_COMPILED = "inductor_compiled_code"


def recompute_activations(model: PreTrainedModel, recompute: Recompute, *, offload: bool = False) -> None:
    """Let layers, adapters attached, recompute activations; `offload` keeps their inputs on the host until then."""
    if recompute == "off":
        return
    options: dict[str, Any] = {"use_reentrant": False}
    if recompute == "selective":
        width = int(model.config.get_text_config().hidden_size)
        options["context_fn"] = partial(_contexts, width, _width_of_last_product(model))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    # for reentrant checkpoints it lets the output of the embedding require a gradient, which nothing else needs
    model.disable_input_require_grads()
    if offload:
        # transformers' own `offload` pins memory, which a machine without a GPU cannot
        module: Any
        for module in model.modules():
            if hasattr(module, "_gradient_checkpointing_func"):
                module._gradient_checkpointing_func = partial(_checkpoint_on_host, options)


def _checkpoint_on_host(options: dict[str, Any], layer: Callable[..., Any], *inputs: Any) -> Any:
    with save_on_cpu(pin_memory=torch.cuda.is_available()):
        return checkpoint(layer, *inputs, **options)


def _width_of_last_product(model: PreTrainedModel) -> int | None:
    """Inner dimension of the product that ends a layer, if nothing after it needs its result; otherwise None."""
    layers: list[Any] = [
        layer for layer in getattr(decoder_of(model), "layers", ()) if not isinstance(layer, IdentityModule)
    ]
    # an adapter is computed after the matrix that it belongs to
    if not layers or not all(is_llama_like(each) and type(each.mlp.down_proj) is nn.Linear for each in layers):
        return None
    widths = [module.in_features for module in layers[0].modules() if isinstance(module, nn.Linear)]
    last: int = layers[0].mlp.down_proj.in_features
    return last if widths.count(last) == 1 else None  # otherwise it cannot be told from the others


def _contexts(width: int, width_of_last: int | None) -> Any:
    return create_selective_checkpoint_contexts(_LayerPolicy(width, width_of_last))


class _LayerPolicy:
    """Decides for each operation in a layer's forward whether its result is kept."""

    def __init__(self, width: int, width_of_last: int | None):
        self._width, self._width_of_last = width, width_of_last
        self._has_ended = False

    def __call__(self, context: Any, operation: Any, *args: Any, **_settings: Any) -> CheckpointPolicy:
        is_kept = not self._has_ended and self._keeps(context.op_output, operation, args)
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    def _keeps(self, result: Any, operation: Any, args: tuple[Any, ...]) -> bool:
        if operation in _PRODUCTS:
            inner = int(args[1 if operation is _aten.addmm.default else 0].shape[-1])
            self._has_ended = inner == self._width_of_last
            is_partial = isinstance(result, DTensor) and any(each.is_partial() for each in result.placements)
            return not self._has_ended and not is_partial and 2 * inner >= self._width
        return operation in _KEPT or operation.namespace in _KEPT_NAMESPACES or operation.name() == _COMPILED
