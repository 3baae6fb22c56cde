"""Flash attention over segments on the CPU: one kernel call per segment, two if it has a prefix.

One autograd function for the full packed row: slicing queries and keys under autograd would allocate a zero-filled
gradient of the full row for every slice.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from thresher.models.attention.segments import Segment, query_slices

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class SegmentedFlash(torch.autograd.Function):
    """query [1, heads, queries, dim], key and value [1, kv heads, rows, dim] -> [1, heads, queries, dim]."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, segments: tuple[Segment, ...], scale: float
    ) -> Tensor:
        out = torch.empty_like(query)
        log_sum = query.new_empty(query.shape[:3], dtype=torch.float32)
        for segment, queries in query_slices(segments):
            rows, prefix = slice(segment.start, segment.stop), slice(segment.prefix_start, segment.prefix_stop)
            q = query[:, :, queries]
            attended, lse = _forward(q, key[:, :, rows], value[:, :, rows], 0.0, True, scale=scale)
            if segment.prefix_length:
                attended, lse = _merge(
                    attended, lse, *_forward(q, key[:, :, prefix], value[:, :, prefix], 0.0, False, scale=scale)
                )
            out[:, :, queries] = attended
            log_sum[:, :, queries] = lse
        ctx.save_for_backward(query, key, value, out, log_sum)
        ctx.segments, ctx.scale = segments, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        *saved, log_sum = ctx.saved_tensors
        dtype = saved[0].dtype
        # the backward kernel is 1.4 to 6 times faster in fp32 than in bf16, most for short segments
        query, key, value, out = (tensor.float() for tensor in saved)
        grad_out = grad_out.float()
        grad_query = torch.empty_like(query)
        grad_key, grad_value = torch.zeros_like(key), torch.zeros_like(value)
        for segment, queries in query_slices(ctx.segments):
            rows = slice(segment.start, segment.stop)
            # with the merged output and log-sum-exp, each call computes its keys' probabilities in the full softmax
            merged = (out[:, :, queries], log_sum[:, :, queries], 0.0)
            grad, q = grad_out[:, :, queries], query[:, :, queries]
            dq, dk, dv = _backward(grad, q, key[:, :, rows], value[:, :, rows], *merged, True, scale=ctx.scale)
            grad_key[:, :, rows] += dk
            grad_value[:, :, rows] += dv
            if segment.prefix_length:
                prefix = slice(segment.prefix_start, segment.prefix_stop)
                k, v = key[:, :, prefix], value[:, :, prefix]
                dq_prefix, dk, dv = _backward(grad, q, k, v, *merged, False, scale=ctx.scale)
                dq = dq + dq_prefix
                grad_key[:, :, prefix] += dk
                grad_value[:, :, prefix] += dv
            grad_query[:, :, queries] = dq
        return grad_query.to(dtype), grad_key.to(dtype), grad_value.to(dtype), None, None


def _merge(first: Tensor, first_log_sum: Tensor, second: Tensor, second_log_sum: Tensor) -> tuple[Tensor, Tensor]:
    """Combine attention over two disjoint sets of keys, each with the log-sum-exp of its scores."""
    log_sum = torch.logaddexp(first_log_sum, second_log_sum)
    first_weight = (first_log_sum - log_sum).exp().unsqueeze(-1)
    second_weight = (second_log_sum - log_sum).exp().unsqueeze(-1)
    return (first * first_weight + second * second_weight).to(first.dtype), log_sum
