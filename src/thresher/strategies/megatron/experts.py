"""Experts of a mixture-of-experts layer, behind Megatron-Core's router and token dispatcher.

The weights of all local experts are stacked, as in transformers, and multiplied in one grouped product. Megatron-Core's
own grouped experts need Transformer Engine; its others run one expert after another.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn


class StackedExperts(nn.Module):
    """gate_up_proj: [local experts, 2 * ffn, hidden], down_proj: [local experts, hidden, ffn]."""

    def __init__(self, num_local_experts: int, config: TransformerConfig, **_: Any):
        super().__init__()
        ffn, hidden, dtype = config.moe_ffn_hidden_size, config.hidden_size, config.params_dtype
        self.gate_up_proj = nn.Parameter(torch.empty(num_local_experts, 2 * ffn, hidden, dtype=dtype))
        self.down_proj = nn.Parameter(torch.empty(num_local_experts, hidden, ffn, dtype=dtype))
        weight: Any
        for weight in (self.gate_up_proj, self.down_proj):
            set_tensor_model_parallel_attributes(weight, True, 0, 1)
            # Megatron-Core sums such gradients over the ranks with the same experts: tensor-parallel ranks may have
            # the same, for different rows
            weight.allreduce = config.expert_model_parallel_size == config.tensor_model_parallel_size == 1

    def forward(self, rows: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """rows: [tokens, hidden], ordered by expert; probs: [tokens] the weight of each output."""
        if not len(rows):
            # a grouped product needs rows; the experts stay on the autograd graph, with a gradient of zero
            gate, _ = (rows @ self.gate_up_proj[0].T).chunk(2, dim=-1)
            return gate @ self.down_proj[0].T, None
        stops = tokens_per_expert.to(rows.device).cumsum(0).to(torch.int32)
        gate, up = F.grouped_mm(rows, self.gate_up_proj.transpose(1, 2), offs=stops).chunk(2, dim=-1)
        inner = (F.silu(gate) * up * probs[:, None]).to(rows.dtype)
        return F.grouped_mm(inner, self.down_proj.transpose(1, 2), offs=stops), None


class PairRouter(TopKRouter):  # type: ignore[misc]
    """Megatron-Core's router without Transformer Engine, which the gate of version 0.16.1 needs even on a GPU."""

    def gating(self, input: Tensor) -> Tensor:  # noqa: A002  named by Megatron-Core
        return F.linear(input.float(), self.weight.float())
