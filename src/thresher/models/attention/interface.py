"""Attention and mask functions registered with transformers; models that use its attention interface call them."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from transformers import AttentionInterface, AttentionMaskInterface

from thresher.errors import UserError
from thresher.models.attention.dense import dense_attention
from thresher.models.attention.flash_cpu import SegmentedFlash
from thresher.models.attention.flex import block_mask, flex_segment_attention
from thresher.models.attention.segments import PackedAttention, Segment

PAIR_ATTENTION = "thresher_pairs"


def register_pair_attention() -> None:
    """Register `attn_implementation="thresher_pairs"`; idempotent."""
    AttentionInterface.register(PAIR_ATTENTION, pair_attention)
    AttentionMaskInterface.register(PAIR_ATTENTION, _no_mask)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def pair_attention(
    module: nn.Module,  # noqa: ARG001  part of the interface
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001  segments replace it
    *,
    pair_visibility: PackedAttention | None = None,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """Attend within segments: [1, heads, queries, dim] -> [1, queries, heads, dim]."""
    if pair_visibility is None:
        raise RuntimeError(
            "the model uses attention over packed pairs but was called without segments; see original_forward"
        )
    if rest.get("s_aux") is not None:
        raise UserError("this model uses attention sinks, which packed layouts do not support; set layout=padded")
    # under autocast, the rotary embedding returns queries and keys in fp32
    query, key = query.to(value.dtype), key.to(value.dtype)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    segments, exchange = pair_visibility.segments, pair_visibility.exchange
    if exchange is not None:
        query, key, value = exchange.gather_sequence(query, key, value)
    longest = max(segment.context_length for segment in segments)
    window = sliding_window if sliding_window is not None and sliding_window < longest else None
    if query.device.type != "cpu":
        out = GPU_KERNELS["segments"](query, key, value, segments, scale, softcap, window)
    elif softcap is None and window is None and query.dtype != torch.float64 and query.shape[-1] == value.shape[-1]:
        out = SegmentedFlash.apply(query, key, value, segments, scale)  # type: ignore[no-untyped-call]
    else:
        out = dense_attention(query, key, value, segments, scale, softcap=softcap, window=window)
    if exchange is not None:
        out = exchange.scatter_sequence(out)
    return out.transpose(1, 2).contiguous(), None


def _flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: tuple[Segment, ...],
    scale: float,
    softcap: float | None,
    window: int | None,
) -> Tensor:
    mask = _cached_mask(segments, key.shape[2], window, query.device)
    return flex_segment_attention(query, key, value, mask, scale, softcap)


# a simulation, whose tensors have no values, replaces the kernel
GPU_KERNELS: dict[str, Callable[..., Tensor]] = {"segments": _flex_attention}


def _no_mask(*_args: Any, **_settings: Any) -> None:
    return None


@lru_cache(maxsize=4)
def _cached_mask(segments: tuple[Segment, ...], num_keys: int, window: int | None, device: torch.device) -> BlockMask:
    return block_mask(segments, num_keys, window, device)
