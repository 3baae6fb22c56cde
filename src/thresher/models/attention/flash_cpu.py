"""Flash attention over consecutive sequences on the CPU: one kernel call per sequence."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from thresher.models.attention.flash import Sequences

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def cpu_forward(query: Tensor, key: Tensor, value: Tensor, sequences: Sequences, scale: float) -> tuple[Tensor, Tensor]:
    """query [queries, heads, dim], key and value [keys, kv heads, dim] -> [queries, heads, dim], [heads, queries]."""
    query, key, value = (_heads_first(tensor) for tensor in (query, key, value))
    out = torch.empty_like(query)
    log_sums = query.new_empty(query.shape[:3], dtype=torch.float32)
    for queries, keys in _slices(sequences):
        heads = query[:, :, queries], key[:, :, keys], value[:, :, keys]
        out[:, :, queries], log_sums[:, :, queries] = _forward(*heads, 0.0, sequences.is_causal, scale=scale)
    return _rows_first(out), log_sums[0]


def cpu_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    log_sums: Tensor,
    sequences: Sequences,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients in fp32: in bf16 the kernel is 1.4 to 6 times slower, most for short sequences."""
    grad_out, query, key, value, out = (_heads_first(tensor.float()) for tensor in (grad_out, query, key, value, out))
    log_sums = log_sums[None]
    grads = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    for queries, keys in _slices(sequences):
        heads = grad_out[:, :, queries], query[:, :, queries], key[:, :, keys], value[:, :, keys], out[:, :, queries]
        parts = _backward(*heads, log_sums[:, :, queries], 0.0, sequences.is_causal, scale=scale)
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
