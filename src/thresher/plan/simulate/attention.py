"""Attention as a GPU computes it, in shapes alone: what it returns, and what it keeps for the backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def _outputs(query: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    out = query.new_empty(*query.shape[:3], value.shape[-1])
    return out, query.new_empty(query.shape[:3], dtype=torch.float32)


# one operation, whose results selective recomputation keeps
_LIBRARY = torch.library.Library("thresher", "FRAGMENT")
_LIBRARY.define("attention_without_values(Tensor query, Tensor value) -> (Tensor, Tensor)")
_LIBRARY.impl("attention_without_values", _outputs, "CompositeExplicitAutograd")


class _Attention(torch.autograd.Function):
    """FlexAttention keeps its inputs, its output and the fp32 log-sum-exp of each query."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out: Tensor
        out, log_sums = torch.ops.thresher.attention_without_values(query, value)
        ctx.save_for_backward(query, key, value, out, log_sums)
        return out

    @staticmethod
    def backward(ctx: Any, _grad: Tensor) -> tuple[Tensor, ...]:
        query, key, value, _, log_sums = ctx.saved_tensors
        torch.empty_like(log_sums)  # sums over the products of outputs and their gradients
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def attention_without_values(query: Tensor, key: Tensor, value: Tensor, *_settings: Any) -> Tensor:
    """Stand in for the attention kernel of GPUs."""
    out: Tensor = _Attention.apply(query, key, value)  # type: ignore[no-untyped-call]
    return out
