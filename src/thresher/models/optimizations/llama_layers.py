"""Replacement forwards for Llama-like decoder layers, with the same values; other models are unchanged.

The last layer skips rows that no scored token depends on: prompt rows except the last contribute only keys and values
there, and their queries, output projection and MLP affect no logp.

RMSNorm and gated MLP have fewer memory passes and fewer saved tensors. The original norm saves its input, the
normalized rows and the result, plus a bf16 copy for each linear layer that follows; the original MLP saves the
activation in addition to gate, up and their product. Here a norm saves its input and one result in the precision of the
following linear layers, and the MLP recomputes its activation.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from thresher.models.attention.interface import pair_attention
from thresher.models.attention.segments import KeptRows

# identical forwards: norm, attention, residual, norm, MLP, residual
_LLAMA_LIKE = {"LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer"}
LLAMA_LIKE_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


def is_llama_like(layer: nn.Module) -> bool:
    return _original_class(layer).__name__ in _LLAMA_LIKE


def _original_class(layer: nn.Module) -> type:
    """Return the layer's class in transformers: FSDP2 replaces it by a subclass."""
    return next(cls for cls in type(layer).__mro__ if not issubclass(cls, FSDPModule))


def skip_unscored_rows(backbone: nn.Module) -> bool:
    """Let the last layer accept `pair_kept`; return True if the model supports it."""
    layers = getattr(backbone, "layers", None)
    if not layers or not is_llama_like(layers[-1]):
        return False
    return replace_forward(layers[-1], _kept_rows_forward)


def replace_forward(module: nn.Module, forward: Any) -> bool:
    """Replace a module's forward unless another library has patched it. Return True if replaced."""
    if "forward" not in vars(module):
        module.forward = MethodType(forward, module)
    return getattr(module.forward, "__func__", None) is forward


def _kept_rows_forward(
    layer: Any, hidden_states: Tensor, *args: Any, pair_kept: KeptRows | None = None, **rest: Any
) -> Any:
    """Compute only the kept rows: [1, rows, hidden] -> [1, kept, hidden]."""
    if pair_kept is None:
        return type(layer).forward(layer, hidden_states, *args, **rest)
    attention, rows = layer.self_attn, pair_kept.rows
    normed = layer.input_layernorm(hidden_states)
    query = _heads(attention, "q", normed.index_select(1, rows))
    key, value = _heads(attention, "k", normed), _heads(attention, "v", normed)
    rotate = sys.modules[_original_class(layer).__module__].apply_rotary_pos_emb
    cos, sin = rest["position_embeddings"]
    query = rotate(query, query, cos.index_select(1, rows), sin.index_select(1, rows))[0]
    key = rotate(key, key, cos, sin)[1]
    context = {"pair_visibility": pair_kept.visibility, "scaling": attention.scaling}
    attended, _ = pair_attention(attention, query, key, value, rest["attention_mask"], **context)
    hidden = hidden_states.index_select(1, rows) + attention.o_proj(attended.flatten(2))
    return hidden + layer.mlp(layer.post_attention_layernorm(hidden))


def _heads(attention: Any, name: str, states: Tensor) -> Tensor:
    """Project to [1, heads, rows, dim], with Qwen3's norm on queries and keys."""
    projected: Tensor = getattr(attention, f"{name}_proj")(states).unflatten(-1, (-1, attention.head_dim))
    norm = getattr(attention, f"{name}_norm", None)
    normed: Tensor = projected if norm is None else norm(projected)
    return normed.transpose(1, 2)


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
    replaced = [module for module in model.modules() if elementwise_function(module) is not None]
    forwards = [vars(module).pop("forward") for module in replaced]
    try:
        yield
    finally:
        for module, forward in zip(replaced, forwards, strict=True):
            module.forward = forward


def elementwise_function(module: nn.Module) -> Callable[..., Tensor] | None:
    """The function that a replaced norm or MLP calls between matrices; None for other modules."""
    functions: dict[Any, Callable[..., Tensor]] = {_norm_forward: rms_norm, _mlp_forward: gated_silu}
    return functions.get(getattr(vars(module).get("forward"), "__func__", None))


def _norm_forward(norm: Any, hidden_states: Tensor) -> Tensor:
    device = hidden_states.device.type
    # round once here, not once in each of the linear layers that follow
    out_dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    function = vars(norm).get(COMPILED, rms_norm)
    out: Tensor = function(hidden_states, norm.weight, norm.variance_epsilon, out_dtype)
    return out


def rms_norm(x: Tensor, weight: Tensor, epsilon: float, out_dtype: torch.dtype | None = None) -> Tensor:
    """weight * x / rms(x): [..., hidden] -> [..., hidden], in fp32 or wider; saves only x and one number per row."""
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
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        return torch.ops.aten.silu_backward(grad * up, gate), F.silu(gate).mul_(grad)
