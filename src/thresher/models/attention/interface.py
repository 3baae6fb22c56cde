"""Attention and mask functions registered with transformers; models that use its attention interface call them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from transformers import AttentionInterface, AttentionMaskInterface

from thresher.errors import UserError
from thresher.models.attention.dense import dense_attention
from thresher.models.attention.flash import SegmentCalls, flash_attention, segment_calls
from thresher.models.attention.flex import block_mask, compiled_flex_attention, flex_segment_attention
from thresher.models.attention.segments import PackedAttention

PAIR_ATTENTION = "thresher_pairs"


@dataclass(frozen=True)
class Window:
    """The mask of a layer with a sliding window: a row attends to itself and the `size` - 1 rows before it."""

    size: int


def register_pair_attention() -> None:
    """Register `attn_implementation="thresher_pairs"`; idempotent."""
    AttentionInterface.register(PAIR_ATTENTION, pair_attention)
    AttentionMaskInterface.register(PAIR_ATTENTION, _window_of_mask)


def pair_attention(
    module: nn.Module,  # noqa: ARG001  part of the interface
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Window | None,
    **context: Any,
) -> tuple[Tensor, None]:
    """Attend within segments: [1, heads, queries, dim] -> [1, queries, heads, dim].

    attention_mask: what `_window_of_mask` returns.
    """
    # under autocast, the rotary embedding returns queries and keys in fp32; here, compiled layers round them with it
    return _attend(query.to(value.dtype), key.to(value.dtype), value, attention_mask, **context), None


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: object,
    *,
    pair_visibility: PackedAttention | None = None,
    scaling: float | None = None,
    softcap: float | None = None,
    **rest: Any,
) -> Tensor:
    if pair_visibility is None:
        raise RuntimeError(
            "the model uses attention over packed pairs but was called without segments; see original_forward"
        )
    if mask is not None and not isinstance(mask, Window):
        raise RuntimeError("the model makes an attention mask of its own, which packed rows do not have")
    if rest.get("s_aux") is not None:
        raise RuntimeError("the model uses attention sinks, which packed rows do not have")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    exchange = pair_visibility.exchange
    if exchange is not None:
        query, key, value = exchange.gather_sequence(query, key, value)
    longest = max(segment.context_length for segment in pair_visibility.segments)
    window = mask.size if mask is not None and mask.size < longest else None
    attend = varlen_attention if pair_visibility.uses_varlen else KERNELS.get(query.device.type, _flex_attention)
    out = attend(query, key, value, pair_visibility, scale, softcap, window)
    if exchange is not None:
        out = exchange.scatter_sequence(out)
    return out.transpose(1, 2).contiguous()


def _cpu_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visibility: PackedAttention,
    scale: float,
    softcap: float | None,
    window: int | None,
) -> Tensor:
    if softcap is None and window is None and query.dtype != torch.float64 and query.shape[-1] == value.shape[-1]:
        return flash_attention(query, key, value, _cached_calls(visibility, key.shape[2], query.device), scale)
    return dense_attention(query, key, value, visibility.segments, scale, softcap=softcap, window=window)


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visibility: PackedAttention,
    scale: float,
    softcap: float | None,
    window: int | None,
) -> Tensor:
    """`attn_implementation: varlen`: flash kernels; without it, a GPU uses FlexAttention."""
    if softcap is not None or window is not None or query.shape[-1] != value.shape[-1]:
        raise UserError(
            "attn_implementation=varlen has no sliding windows, no soft-capped scores and no values of another width "
            "than the keys, and this model has one of them; remove attn_implementation"
        )
    if query.device.type == "cuda" and query.dtype not in (torch.bfloat16, torch.float16):
        raise UserError("attn_implementation=varlen needs dtype bf16 or fp16 on a GPU; remove attn_implementation")
    return flash_attention(query, key, value, _cached_calls(visibility, key.shape[2], query.device), scale)


def _flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visibility: PackedAttention,
    scale: float,
    softcap: float | None,
    window: int | None,
) -> Tensor:
    mask = cached_mask(visibility, key.shape[2], window, query.device)
    return flex_segment_attention(query, key, value, mask, scale, softcap, compiled_flex_attention())


# by type of device; a simulation, whose tensors have no values, replaces the kernel of GPUs
KERNELS: dict[str, Callable[..., Tensor]] = {"cpu": _cpu_attention, "cuda": _flex_attention}


def cached_mask(visibility: PackedAttention, num_keys: int, window: int | None, device: torch.device) -> BlockMask:
    """Return the block mask of a micro-batch, which its layers share."""
    key = num_keys, window, device
    if key not in visibility.masks:
        visibility.masks[key] = block_mask(visibility.segments, num_keys, window, device)
    return visibility.masks[key]


def _cached_calls(visibility: PackedAttention, num_keys: int, device: torch.device) -> SegmentCalls:
    key = num_keys, device
    if key not in visibility.calls:
        visibility.calls[key] = segment_calls(visibility.segments, num_keys, device)
    return visibility.calls[key]


def _window_of_mask(*_args: Any, local_size: int | None = None, **_settings: Any) -> Window | None:
    """Replace the mask of a layer; segments say the rest.

    The window is taken from here because the model's own attention (sdpa, eager) knows it only from its mask: some
    families do not pass it to the attention function, and some configs have one that the model does not use.
    """
    return None if local_size is None else Window(local_size)
