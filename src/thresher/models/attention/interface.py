"""Attention over segments: the choice of a kernel, and the function that models call through transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from transformers import AttentionInterface, AttentionMaskInterface

from thresher.errors import UserError
from thresher.models.attention.flash import flash_attention, segment_calls
from thresher.models.attention.flex import block_mask, compiled_flex_attention, flex_segment_attention
from thresher.models.attention.segments import PackedAttention, Segment

PAIR_ATTENTION = "thresher_pairs"
# by device type, instead of `segment_attention`: a simulation on fake tensors replaces the kernel of GPUs
KERNELS: dict[str, Callable[..., Tensor]] = {}


def segment_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visibility: PackedAttention,
    scale: float,
    softcap: float | None,
    window: int | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attend with the kernel for these inputs: [1, heads, queries, dim] -> [1, heads, queries, value dim].

    sinks [heads] are scores that take part in the softmax of each query and have no value. A GPU uses FlexAttention;
    with `attn_implementation: varlen`, flash kernels. A CPU uses flash kernels, and dense attention for what they lack.
    """
    device, num_keys = query.device, key.shape[2]
    is_plain = softcap is None and window is None and query.shape[-1] == value.shape[-1]
    if visibility.uses_varlen:
        _check_varlen(query, is_plain=is_plain)
    if visibility.uses_varlen or (device.type == "cpu" and is_plain and query.dtype != torch.float64):
        calls = visibility.cached(
            ("calls", num_keys, device), lambda: segment_calls(visibility.segments, num_keys, device)
        )
        return flash_attention(query, key, value, calls, scale, sinks)
    if device.type == "cpu":
        segments = visibility.segments
        return dense_attention(query, key, value, segments, scale, softcap=softcap, window=window, sinks=sinks)
    mask = cached_mask(visibility, num_keys, window, device)
    return flex_segment_attention(query, key, value, mask, scale, softcap, compiled_flex_attention(), sinks)


def _check_varlen(query: Tensor, *, is_plain: bool) -> None:
    if not is_plain:
        raise UserError(
            "attn_implementation=varlen has no sliding windows, no soft-capped scores and no values of a different "
            "width than the keys, and this model has one of them; remove attn_implementation"
        )
    if query.device.type == "cuda" and query.dtype not in (torch.bfloat16, torch.float16):
        raise UserError("attn_implementation=varlen needs dtype bf16 or fp16 on a GPU; remove attn_implementation")


def cached_mask(visibility: PackedAttention, num_keys: int, window: int | None, device: torch.device) -> BlockMask:
    """Return the block mask of a micro-batch, which its layers share."""
    return visibility.cached(
        ("mask", num_keys, window, device), lambda: block_mask(visibility.segments, num_keys, window, device)
    )


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
    """Attend within segments, in a window if there is one: [1, heads, queries, dim] -> [1, queries, heads, dim]."""
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
    s_aux: Tensor | None = None,  # attention sinks, as transformers names them
    **_rest: Any,
) -> Tensor:
    if pair_visibility is None:
        raise RuntimeError(
            "the model uses attention over packed pairs but was called without segments; see original_forward"
        )
    if mask is not None and not isinstance(mask, Window):
        raise TypeError("the model makes its own attention mask, which packed rows do not have")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    exchange = pair_visibility.exchange
    if exchange is not None:
        query, key, value = exchange.gather_sequence(query, key, value)
        s_aux = None if s_aux is None else s_aux.chunk(exchange.size)[exchange.rank]
    longest = max(segment.context_length for segment in pair_visibility.segments)
    window = mask.size if mask is not None and mask.size < longest else None
    replaced = None if pair_visibility.uses_varlen else KERNELS.get(query.device.type)
    out = (replaced or segment_attention)(query, key, value, pair_visibility, scale, softcap, window, s_aux)
    if exchange is not None:
        out = exchange.scatter_sequence(out)
    return out.transpose(1, 2).contiguous()


def _window_of_mask(*_args: Any, local_size: int | None = None, **_settings: Any) -> Window | None:
    """Replace a layer's mask; segments say the rest.

    The window is taken from here because the model's own attention (sdpa, eager) knows it only from its mask: some
    families do not pass it to the attention function, and some configs have one that the model does not use.
    """
    return None if local_size is None else Window(local_size)


def dense_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: tuple[Segment, ...],
    scale: float,
    *,
    softcap: float | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend one segment at a time: the reference for the kernels, and for soft caps and windows on a CPU.

    query [1, heads, queries, dim], key and value [1, kv heads, rows, dim], sinks [heads]
    -> [1, heads, queries, value dim].
    Memory is the sum of length * context_length over segments, not queries * rows.
    """
    # split and cat, not slices: a slice's backward fills a tensor of the full row, a split's is one cat
    keys, values = _SplitRows(key, segments), _SplitRows(value, segments)
    queries = query.split([segment.length for segment in segments], dim=2)
    outputs = [
        _attend_densely(
            segment_query, keys.visible_to(segment), values.visible_to(segment), scale, softcap, window, sinks
        )
        for segment, segment_query in zip(segments, queries, strict=True)
    ]
    return torch.cat(outputs, dim=2)


class _SplitRows:
    """Keys or values, split at every segment and prefix boundary."""

    def __init__(self, rows: Tensor, segments: tuple[Segment, ...]) -> None:
        cuts = {0, rows.shape[2]}
        for segment in segments:
            cuts |= {segment.start, segment.stop}
            if segment.prefix_length:
                cuts |= {segment.prefix_start, segment.prefix_stop}
        edges = sorted(cuts)
        self._index_of = {edge: index for index, edge in enumerate(edges)}
        self._pieces: tuple[Tensor, ...] = rows.split([stop - start for start, stop in pairwise(edges)], dim=2)

    def visible_to(self, segment: Segment) -> Tensor:
        """Concatenate the rows of a segment's prefix and of the segment: the order of their positions."""
        pieces = self._between(segment.start, segment.stop)
        if segment.prefix_length:
            pieces = self._between(segment.prefix_start, segment.prefix_stop) + pieces
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=2)

    def _between(self, start: int, stop: int) -> tuple[Tensor, ...]:
        return self._pieces[self._index_of[start] : self._index_of[stop]]


def _attend_densely(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    softcap: float | None,
    window: int | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attend from the last `length` positions to all `context` positions up to them, at most `window` - 1 back.

    query [1, heads, length, dim], key and value [1, kv heads, context, dim] -> [1, heads, length, value dim].
    """
    (_, heads, length, _), (_, kv_heads, context, _) = query.shape, key.shape
    groups = heads // kv_heads
    # query heads of one key/value head are consecutive, so they become rows of one matrix and no key is repeated
    scores = (query.reshape(1, kv_heads, groups * length, -1) @ key.transpose(2, 3)) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    positions = torch.arange(context, device=query.device)
    distance = positions[context - length :, None] - positions
    is_hidden = (distance < 0) | (distance >= (context if window is None else window))
    scores = scores.view(1, kv_heads, groups, length, context).masked_fill(is_hidden, -torch.inf)
    if sinks is not None:
        column = sinks.to(scores.dtype).view(1, kv_heads, groups, 1, 1).expand(-1, -1, -1, length, 1)
        scores = torch.cat([scores, column], dim=-1)
    # fp32 or wider: bf16 loses too much precision in a sum over many keys
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(value.dtype)
    out = weights[..., :context].reshape(1, kv_heads, groups * length, context) @ value
    return out.view(1, heads, length, value.shape[-1])
