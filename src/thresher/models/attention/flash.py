"""Flash attention over segments: one call for each segment's own rows and one for the prefixes, joined by log-sum-exp.

One autograd function for the full packed row, since autograd of torch's kernels ignores the gradient of a log-sum-exp.
In the backward, each call gets the joined output and log-sum-exp, and so computes its keys' share of the full softmax.
A sink is one more key, whose value is zero: it joins last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thresher.distributed.tensors import copy_arrays_to_device
from thresher.models.attention.segments import Segment, query_slices

# gradient of the output, query, key, value, output, log-sum-exps
_Saved = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
_Grads = tuple[Tensor, Tensor, Tensor]  # of query, key, value
_Output = tuple[Tensor, Tensor]  # [queries, heads, dim], and the log-sum-exps [heads, queries]


@dataclass(frozen=True)
class Sequences:
    """Rows of one kernel call: consecutive sequences of queries, and of the keys that each of them attends to."""

    queries: Tensor | None  # indices of the rows; None if they are all rows
    keys: Tensor | None
    query_ends: Tensor  # cumulative lengths, with a leading 0, for kernels
    key_ends: Tensor
    query_lengths: tuple[int, ...]  # on the host
    key_lengths: tuple[int, ...]
    is_causal: bool


# of a micro-batch: each segment's own rows, then the prefixes, if any segment has one
Calls = tuple[Sequences, ...]


def _flat(calls: Calls) -> tuple[list[Tensor | None], list[int]]:
    """Arguments of an operation: four tensors per call, and its number of sequences with their lengths."""
    tensors = [each for call in calls for each in (call.queries, call.keys, call.query_ends, call.key_ends)]
    lengths = [(len(call.query_lengths), *call.query_lengths, *call.key_lengths) for call in calls]
    return tensors, [length for of_call in lengths for length in of_call]


def _from_flat(tensors: list[Any], lengths: list[int]) -> Calls:
    calls: list[Sequences] = []
    while tensors:
        (queries, keys, query_ends, key_ends), tensors = tensors[:4], tensors[4:]
        count, *lengths = lengths
        of_queries, of_keys, lengths = lengths[:count], lengths[count : 2 * count], lengths[2 * count :]
        ends = query_ends, key_ends
        calls.append(Sequences(queries, keys, *ends, tuple(of_queries), tuple(of_keys), is_causal=not calls))
    return tuple(calls)


def segment_calls(segments: tuple[Segment, ...], num_keys: int, device: torch.device) -> Calls:
    """List the rows of the calls on the host; no sequence is empty, for which kernels differ in what they return."""
    num_queries = sum(segment.length for segment in segments)
    own, prefixes = [], []
    for segment, rows in query_slices(segments):
        if segment.length:
            own.append((range(rows.start, rows.stop), range(segment.start, segment.stop)))
            if segment.prefix_length:
                prefixes.append((own[-1][0], range(segment.prefix_start, segment.prefix_stop)))
    calls = [_sequences(own, num_queries, num_keys, device, is_causal=True)]
    if prefixes:
        calls.append(_sequences(prefixes, num_queries, num_keys, device, is_causal=False))
    return tuple(calls)


def _sequences(
    parts: list[tuple[range, range]], num_queries: int, num_keys: int, device: torch.device, *, is_causal: bool
) -> Sequences:
    lengths = [tuple(map(len, ranges)) for ranges in zip(*parts, strict=True)]
    ends = [np.cumsum([0, *each]) for each in lengths]
    rows = [
        np.concatenate([np.arange(each.start, each.stop) for each in ranges]) for ranges in zip(*parts, strict=True)
    ]
    query_ends, key_ends, *indices = copy_arrays_to_device([*ends, *rows], device)
    queries, keys = (
        None if np.array_equal(each, np.arange(count)) else index
        for each, count, index in zip(rows, (num_queries, num_keys), indices, strict=True)
    )
    return Sequences(queries, keys, query_ends, key_ends, lengths[0], lengths[1], is_causal)


class SegmentedFlash(torch.autograd.Function):
    """query [queries, heads, dim], key and value [rows, kv heads, dim], sinks [heads] -> [queries, heads, dim]."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, calls: Calls, scale: float
    ) -> Tensor:
        out: Tensor
        out, log_sums = torch.ops.thresher.segmented_flash(query, key, value, sinks, *_flat(calls), scale)
        ctx.save_for_backward(query, key, value, sinks, out, log_sums)
        ctx.calls, ctx.scale = calls, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None, None, None]:
        query, key, value, sinks, out, log_sums = ctx.saved_tensors
        _, backward = _KERNELS[query.device.type]
        own, *prefixes = ctx.calls
        seen = (_take(tensor, own.keys) for tensor in (key, value))
        grad_query, *grads = backward((grad_out, query, *seen, out, log_sums), own, ctx.scale)
        grad_key, grad_value = (_spread(grad, own.keys, len(key)) for grad in grads)
        for prefix in prefixes:
            rows = prefix.queries
            of_queries = (_take(tensor, rows) for tensor in (grad_out, query))
            seen = (_take(tensor, prefix.keys) for tensor in (key, value))
            joined = _take(out, rows), _take(log_sums, rows, 1)
            of_prefix = backward((*of_queries, *seen, *joined), prefix, ctx.scale)
            _add(grad_query, rows, of_prefix[0])
            # a row is in at most two calls' keys, so the order in which a GPU adds does not matter
            _add(grad_key, prefix.keys, of_prefix[1])
            _add(grad_value, prefix.keys, of_prefix[2])
        grad_sinks = _sinks_gradient(grad_out, out, log_sums, sinks) if ctx.needs_input_grad[3] else None
        return grad_query.to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype), grad_sinks, None, None


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    tensors: list[Tensor | None],
    lengths: list[int],
    scale: float,
) -> _Output:
    own, *prefixes = _from_flat(tensors, lengths)
    forward, _ = _KERNELS[query.device.type]
    out, log_sums = forward(query, _take(key, own.keys), _take(value, own.keys), own, scale)
    for prefix in prefixes:
        rows = prefix.queries
        seen = (_take(tensor, prefix.keys) for tensor in (key, value))
        of_prefix = forward(_take(query, rows), *seen, prefix, scale)
        joined, joined_sums = _join(_take(out, rows), _take(log_sums, rows, 1), *of_prefix)
        out, log_sums = _put(out, rows, joined), _put(log_sums, rows, joined_sums, 1)
    if sinks is None:
        return out, log_sums
    total = torch.logaddexp(log_sums, sinks.to(log_sums.dtype)[:, None])
    return (out * (log_sums - total).exp().t().unsqueeze(-1)).to(out.dtype), total


def _sinks_gradient(grad_out: Tensor, out: Tensor, log_sums: Tensor, sinks: Tensor) -> Tensor:
    """-sum over queries of p * <grad_out, out>, where p is a sink's share of the softmax: [heads]."""
    share = (sinks.to(log_sums.dtype)[:, None] - log_sums).exp()
    products = (grad_out.to(log_sums.dtype) * out).sum(-1).t()
    return -(share * products).sum(1).to(sinks.dtype)


# one operation: selective recomputation keeps its results and not the results of each call
_LIBRARY = torch.library.Library("thresher", "FRAGMENT")
_LIBRARY.define(
    "segmented_flash(Tensor query, Tensor key, Tensor value, Tensor? sinks, Tensor?[] tensors, int[] lengths, "
    "float scale) -> (Tensor, Tensor)"
)
_LIBRARY.impl("segmented_flash", _attend, "CPU")
_LIBRARY.impl("segmented_flash", _attend, "CUDA")


@torch.library.register_fake("thresher::segmented_flash", lib=_LIBRARY)  # type: ignore[untyped-decorator]
def _without_values(query: Tensor, *_rest: Any) -> _Output:
    return torch.empty_like(query), query.new_empty(query.shape[1], query.shape[0], dtype=torch.float32)


def flash_attention(
    query: Tensor, key: Tensor, value: Tensor, calls: Calls, scale: float, sinks: Tensor | None = None
) -> Tensor:
    """query [1, heads, queries, dim], key and value [1, kv heads, rows, dim] -> [1, heads, queries, dim]."""
    rows_first = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    out: Tensor = SegmentedFlash.apply(*rows_first, sinks, calls, scale)  # type: ignore[no-untyped-call]
    return out.transpose(0, 1)[None]


def _cuda_forward(query: Tensor, key: Tensor, value: Tensor, sequences: Sequences, scale: float) -> _Output:
    out, log_sums, _ = _varlen_operators()._varlen_attn(
        query, key, value, *_lengths(sequences), sequences.is_causal, scale, enable_gqa=query.shape[1] != key.shape[1]
    )
    return out, log_sums


def _cuda_backward(saved: _Saved, sequences: Sequences, scale: float) -> _Grads:
    grad_out, *others = saved
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=grad_out.device)
    grads: _Grads = _varlen_operators()._varlen_attn_backward(
        grad_out.contiguous(), *others, *_lengths(sequences), sequences.is_causal, no_dropout, scale
    )
    return grads


def _varlen_operators() -> Any:
    from torch.nn.attention import varlen  # noqa: F401  registers them

    return torch.ops.torch_attn


def _lengths(sequences: Sequences) -> tuple[Tensor, Tensor, int, int]:
    return sequences.query_ends, sequences.key_ends, max(sequences.query_lengths), max(sequences.key_lengths)


def _cpu_forward(query: Tensor, key: Tensor, value: Tensor, sequences: Sequences, scale: float) -> _Output:
    query, key, value = (_heads_first(tensor) for tensor in (query, key, value))
    out = torch.empty_like(query)
    log_sums = query.new_empty(query.shape[:3], dtype=torch.float32)
    for queries, keys in _slices(sequences):
        heads = query[:, :, queries], key[:, :, keys], value[:, :, keys]
        out[:, :, queries], log_sums[:, :, queries] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *heads, 0.0, sequences.is_causal, scale=scale
        )
    return _rows_first(out), log_sums[0]


def _cpu_backward(saved: _Saved, sequences: Sequences, scale: float) -> _Grads:
    """Return the gradients in fp32: in bf16 the kernel is 1.4 to 6 times slower, most for short sequences."""
    grad_out, query, key, value, out = (_heads_first(tensor.float()) for tensor in saved[:5])
    log_sums = saved[5][None]
    grads = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    for queries, keys in _slices(sequences):
        heads = grad_out[:, :, queries], query[:, :, queries], key[:, :, keys], value[:, :, keys], out[:, :, queries]
        parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *heads, log_sums[:, :, queries], 0.0, sequences.is_causal, scale=scale
        )
        for grad, rows, part in zip(grads, (queries, keys, keys), parts, strict=True):
            grad[:, :, rows] = part
    return _rows_first(grads[0]), _rows_first(grads[1]), _rows_first(grads[2])


def _slices(sequences: Sequences) -> Iterator[tuple[slice, slice]]:
    ends = (pairwise(accumulate(each, initial=0)) for each in (sequences.query_lengths, sequences.key_lengths))
    for queries, keys in zip(*ends, strict=True):
        yield slice(*queries), slice(*keys)


def _heads_first(rows: Tensor) -> Tensor:
    return rows.transpose(0, 1)[None]


def _rows_first(heads: Tensor) -> Tensor:
    return heads[0].transpose(0, 1)


_KERNELS: dict[str, tuple[Callable[..., _Output], Callable[..., _Grads]]] = {
    "cpu": (_cpu_forward, _cpu_backward),
    "cuda": (_cuda_forward, _cuda_backward),
}


def _join(first: Tensor, first_sums: Tensor, second: Tensor, second_sums: Tensor) -> _Output:
    """Combine attention over two disjoint sets of keys, each with the log-sum-exp of its scores [heads, queries]."""
    log_sums = torch.logaddexp(first_sums, second_sums)
    first_weight = (first_sums - log_sums).exp().t().unsqueeze(-1)
    second_weight = (second_sums - log_sums).exp().t().unsqueeze(-1)
    return (first * first_weight + second * second_weight).to(first.dtype), log_sums


def _take(tensor: Tensor, rows: Tensor | None, dim: int = 0) -> Tensor:
    return tensor if rows is None else tensor.index_select(dim, rows)


def _put(tensor: Tensor, rows: Tensor | None, values: Tensor, dim: int = 0) -> Tensor:
    return values if rows is None else tensor.index_copy_(dim, rows.long(), values)


def _add(tensor: Tensor, rows: Tensor | None, values: Tensor) -> None:
    if rows is None:
        tensor += values
    else:
        tensor.index_add_(0, rows, values)


def _spread(values: Tensor, rows: Tensor | None, num_rows: int) -> Tensor:
    """Spread the gradients of some rows over all rows, with zeros elsewhere."""
    if rows is None:
        return values
    return values.new_zeros(num_rows, *values.shape[1:]).index_copy_(0, rows.long(), values)
