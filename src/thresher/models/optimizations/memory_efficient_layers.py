"""RMSNorm and gated MLP of Llama-like layers with fewer memory passes and fewer saved tensors.

The original norm saves its input, the normalized rows and the result, plus a bf16 copy for each linear layer that
follows; the original MLP saves the activation in addition to gate, up and their product. Here a norm saves its input
and one result in the precision of the following linear layers, and the MLP recomputes its activation. Values are the
same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thresher.models.optimizations.last_layer import is_llama_like, replace_forward

# attribute of a module: its elementwise function, compiled
COMPILED = "compiled_elementwise"


def use_memory_efficient_layers(backbone: nn.Module) -> None:
    """Replace the norms and MLPs of Llama-like layers; other layers are unchanged."""
    for layer in getattr(backbone, "layers", ()):
        if not is_llama_like(layer):
            continue
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            replace_forward(norm, _norm_forward)
        if layer.mlp.config.hidden_act == "silu":
            replace_forward(layer.mlp, _mlp_forward)


@contextmanager
def original_forwards(model: nn.Module) -> Iterator[None]:
    """Restore the original forwards within a `with` block."""
    replaced = [module for module in model.modules() if _is_replaced(module)]
    forwards = [vars(module).pop("forward") for module in replaced]
    try:
        yield
    finally:
        for module, forward in zip(replaced, forwards, strict=True):
            module.forward = forward


def _is_replaced(module: nn.Module) -> bool:
    return _replacement(module) in (_norm_forward, _mlp_forward)


def _replacement(module: nn.Module) -> Any:
    return getattr(vars(module).get("forward"), "__func__", None)


def elementwise_function(module: nn.Module) -> Callable[..., Tensor] | None:
    """The function that a replaced norm or MLP calls between matrices; None for other modules."""
    functions: dict[Any, Callable[..., Tensor]] = {_norm_forward: rms_norm, _mlp_forward: gated_silu}
    return functions.get(_replacement(module))


def _norm_forward(norm: Any, hidden_states: Tensor) -> Tensor:
    device = hidden_states.device.type
    # round once here, not once in each of the linear layers that follow
    out_dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    function = vars(norm).get(COMPILED, rms_norm)
    out: Tensor = function(hidden_states, norm.weight, norm.variance_epsilon, out_dtype)
    return out


def rms_norm(x: Tensor, weight: Tensor, epsilon: float, out_dtype: torch.dtype | None = None) -> Tensor:
    """weight * x / rms(x), computed in fp32 or wider; saves only x and one number per row."""
    out: Tensor = _RMSNorm.apply(x, weight, epsilon, out_dtype)  # type: ignore[no-untyped-call]
    return out


def _mlp_forward(mlp: Any, rows: Tensor) -> Tensor:
    function = vars(mlp).get(COMPILED, gated_silu)
    out: Tensor = mlp.down_proj(function(mlp.gate_proj(rows), mlp.up_proj(rows)))
    return out


def gated_silu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up; saves only gate and up."""
    out: Tensor = _GatedSilu.apply(gate, up)  # type: ignore[no-untyped-call]
    return out


class _RMSNorm(torch.autograd.Function):
    """weight * x / rms(x): [..., hidden] -> [..., hidden], computed in fp32 or wider, returned in out_dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float, out_dtype: torch.dtype | None) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        mean_square = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.shape[-1])
        inverse_rms = mean_square.add_(epsilon).rsqrt_()
        ctx.save_for_backward(x, weight, inverse_rms)
        result: Tensor = (wide * inverse_rms).mul_(weight)
        return result.to(out_dtype or torch.promote_types(x.dtype, weight.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        x, weight, inverse_rms = ctx.saved_tensors
        grad = grad.to(inverse_rms.dtype)
        normed = x * inverse_rms
        along = grad * normed
        grad_weight = along.flatten(0, -2).sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        # gradient through rms(x)
        rms_term = (along @ weight.to(along.dtype)).div_(-x.shape[-1]).unsqueeze_(-1)
        grad_x = (grad * weight).addcmul_(normed, rms_term).mul_(inverse_rms)
        return grad_x.to(x.dtype), grad_weight, None, None


class _GatedSilu(torch.autograd.Function):
    """silu(gate) * up, saving only gate and up."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        return torch.ops.aten.silu_backward(grad * up, gate), F.silu(gate).mul_(grad)
