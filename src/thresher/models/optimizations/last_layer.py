"""Skip rows of the last layer that no scored token depends on.

Prompt rows except the last contribute only keys and values there: their queries, output projection and MLP affect no
logp. For Llama-like decoder layers a replacement forward skips them; other models compute all rows.
"""

from __future__ import annotations

import sys
from types import MethodType
from typing import Any

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
    attended, _ = pair_attention(
        attention,
        query,
        key,
        value,
        rest["attention_mask"],
        pair_visibility=pair_kept.visibility,
        scaling=attention.scaling,
    )
    hidden = hidden_states.index_select(1, rows) + attention.o_proj(attended.flatten(2))
    return hidden + layer.mlp(layer.post_attention_layernorm(hidden))


def _heads(attention: Any, name: str, states: Tensor) -> Tensor:
    """Project to [1, heads, rows, dim], with Qwen3's norm on queries and keys."""
    projected: Tensor = getattr(attention, f"{name}_proj")(states).unflatten(-1, (-1, attention.head_dim))
    norm = getattr(attention, f"{name}_norm", None)
    normed: Tensor = projected if norm is None else norm(projected)
    return normed.transpose(1, 2)
