"""The last layer on the rows that count: of prompt rows, all but the last give keys and values and nothing more.

Their queries, output projection and MLP in the last layer reach no scored token. For decoder layers of Llama's shape
the layer's forward is replaced by one that leaves them out; all other families compute whole rows, as written.
"""

from __future__ import annotations

import sys
from types import MethodType
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from thresher.models.attention.interface import pair_attention
from thresher.models.attention.segments import KeptRows

# the same forward, to the letter: norm, attention, residual, norm, MLP, residual
_SAME_SHAPE = {"LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer"}


def is_llama_like(layer: nn.Module) -> bool:
    return _class_as_written(layer).__name__ in _SAME_SHAPE


def _class_as_written(layer: nn.Module) -> type:
    """The class that a family's authors wrote: FSDP2 gives a layer that it shards a subclass of it."""
    return next(cls for cls in type(layer).__mro__ if not issubclass(cls, FSDPModule))


def skip_unscored_rows(backbone: nn.Module) -> bool:
    """Let the last layer honour `pair_kept`; say whether this model's shape allows it."""
    layers = getattr(backbone, "layers", None)
    if not layers or not is_llama_like(layers[-1]):
        return False
    return replace_forward(layers[-1], _pruned_forward)


def replace_forward(module: nn.Module, forward: Any) -> bool:
    """Give one module a forward of ours; somebody else's, a hook of another library say, stays. Tell if ours is in."""
    if "forward" not in vars(module):
        module.forward = MethodType(forward, module)
    return getattr(module.forward, "__func__", None) is forward


def _pruned_forward(
    layer: Any, hidden_states: Tensor, *args: Any, pair_kept: KeptRows | None = None, **rest: Any
) -> Any:
    """Compute the kept rows only: [1, rows, hidden] in, [1, kept, hidden] out."""
    if pair_kept is None:
        return type(layer).forward(layer, hidden_states, *args, **rest)
    attention, rows = layer.self_attn, pair_kept.rows
    normed = layer.input_layernorm(hidden_states)
    query = _heads(attention, "q", normed.index_select(1, rows))
    key, value = _heads(attention, "k", normed), _heads(attention, "v", normed)
    rotate = sys.modules[_class_as_written(layer).__module__].apply_rotary_pos_emb
    cos, sin = rest["position_embeddings"]
    query = rotate(query, query, cos.index_select(1, rows), sin.index_select(1, rows))[0]
    key = rotate(key, key, cos, sin)[1]
    attended, _ = pair_attention(
        attention,
        query,
        key,
        value,
        None,
        pair_visibility=pair_kept.visibility,
        scaling=attention.scaling,
        sliding_window=_window(layer),
    )
    hidden = hidden_states.index_select(1, rows) + attention.o_proj(attended.flatten(2))
    return hidden + layer.mlp(layer.post_attention_layernorm(hidden))


def _window(layer: Any) -> int | None:
    # only Mistral reads it from the config; others may carry the key and mean nothing by it
    is_mistral = _class_as_written(layer).__name__ == "MistralDecoderLayer"
    window: int | None = getattr(layer.self_attn.config if is_mistral else layer.self_attn, "sliding_window", None)
    return window


def _heads(attention: Any, name: str, states: Tensor) -> Tensor:
    """Project to [1, heads, rows, dim], with the norm that Qwen3 puts on queries and keys."""
    projected: Tensor = getattr(attention, f"{name}_proj")(states).unflatten(-1, (-1, attention.head_dim))
    norm = getattr(attention, f"{name}_norm", None)
    normed: Tensor = projected if norm is None else norm(projected)
    return normed.transpose(1, 2)
