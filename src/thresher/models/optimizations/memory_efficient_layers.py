"""Norms and gated MLPs that pass over memory fewer times and keep less for the backward.

For decoder layers of Llama's shape. As written they keep, of every norm, its input, the normalised rows and the result,
once more for each linear map that rounds it to bf16; and of the MLP the activation beside gate, up and their product.
Here a norm keeps its input and one result, already in the precision of the maps that follow, and the MLP recomputes
its activation. The numbers are the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thresher.models.optimizations.last_layer import is_llama_like, replace_forward


def use_memory_efficient_layers(backbone: nn.Module) -> None:
    """Replace norms and MLPs of layers of the known shape; others stay as written."""
    for layer in getattr(backbone, "layers", ()):
        if not is_llama_like(layer):
            continue
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            replace_forward(norm, _norm_forward)
        if layer.mlp.config.hidden_act == "silu":
            replace_forward(layer.mlp, _mlp_forward)


@contextmanager
def original_forwards(model: nn.Module) -> Iterator[None]:
    """Take our replacements out for the length of a `with` block."""
    replaced = [module for module in model.modules() if _is_ours(module)]
    ours = [vars(module).pop("forward") for module in replaced]
    try:
        yield
    finally:
        for module, forward in zip(replaced, ours, strict=True):
            module.forward = forward


def _is_ours(module: nn.Module) -> bool:
    return getattr(vars(module).get("forward"), "__func__", None) in (_norm_forward, _mlp_forward)


def _norm_forward(norm: Any, hidden_states: Tensor) -> Tensor:
    device = hidden_states.device.type
    # what follows is a linear map, which would round it: once here, not once for each of them
    rounded = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    out: Tensor = _RMSNorm.apply(hidden_states, norm.weight, norm.variance_epsilon, rounded)  # type: ignore[no-untyped-call]
    return out


def _mlp_forward(mlp: Any, rows: Tensor) -> Tensor:
    out: Tensor = mlp.down_proj(_GatedSilu.apply(mlp.gate_proj(rows), mlp.up_proj(rows)))  # type: ignore[no-untyped-call]
    return out


class _RMSNorm(torch.autograd.Function):
    """weight * x / rms(x): [..., hidden] -> [..., hidden], in fp32 at least, the result rounded as asked."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float, rounded: torch.dtype | None) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        mean_square = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.shape[-1])
        inverse_rms = mean_square.add_(epsilon).rsqrt_()
        ctx.save_for_backward(x, weight, inverse_rms)
        result: Tensor = (wide * inverse_rms).mul_(weight)
        return result.to(rounded or torch.promote_types(x.dtype, weight.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        x, weight, inverse_rms = ctx.saved_tensors
        grad = grad.to(inverse_rms.dtype)
        normed = x * inverse_rms
        along = grad * normed
        grad_weight = along.flatten(0, -2).sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        # what the norm's own dependence on x takes back
        shrinking = (along @ weight.to(along.dtype)).div_(-x.shape[-1]).unsqueeze_(-1)
        grad_x = (grad * weight).addcmul_(normed, shrinking).mul_(inverse_rms)
        return grad_x.to(x.dtype), grad_weight, None, None


class _GatedSilu(torch.autograd.Function):
    """silu(gate) * up, keeping gate and up alone."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        return torch.ops.aten.silu_backward(grad * up, gate), F.silu(gate).mul_(grad)
