"""Layers of a Megatron-Core model: its linear layers, MLPs and token dispatcher with our norm and our attention.

Our attention replaces Megatron-Core's, so packed and shared rows run under it. It also applies the
rotary embedding, with the angles of transformers: packed rows have arbitrary positions, and every kind of scaling that
transformers knows is exact.

The weights of all local experts are stacked, as in transformers, and multiplied in one grouped product. Megatron-Core's
own grouped experts need Transformer Engine; its others run one expert after another.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from thresher.models.attention.interface import pair_attention
from thresher.models.attention.segments import PackedAttention
from thresher.models.optimizations.llama_layers import rms_norm

# megatron-core 0.16.1 takes the default fp8=False for fp8, which needs Transformer Engine
tensor_parallel.CheckpointWithoutOutput = partial(CheckpointWithoutOutput, fp8=None)


@dataclass(frozen=True)
class AttentionContext:
    """What the attention needs to know of a micro-batch.

    It travels as Megatron-Core's `attention_bias`, which all layers pass on unread and which recomputed activations get
    from a closure, not from the model: in a pipeline a different micro-batch may have run in between.
    """

    # of the rotary embedding, [sequences or 1, rows, head dim]
    cos: Tensor
    sin: Tensor
    # None for plain causal attention
    visibility: PackedAttention | None


class PairRMSNorm(nn.Module):
    """RMSNorm with the numerics of transformers; Megatron-Core's own has no sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size, dtype=config.params_dtype))
        # Megatron-Core then sums the gradient over tensor-parallel ranks, each of which has some rows
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.epsilon = eps

    def forward(self, rows: Tensor) -> Tensor:
        # of the weights' dtype even if the residual stream is fp32
        return rms_norm(rows, self.weight, self.epsilon, self.weight.dtype)


class PairCoreAttention(nn.Module):
    """Rotary embedding and attention over the local heads."""

    def __init__(self, config: TransformerConfig, **_: Any):
        super().__init__()
        self.scale = config.kv_channels**-0.5 if config.softmax_scale is None else config.softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,  # noqa: ARG002  part of the interface
        *,
        attention_bias: AttentionContext,
        **_: Any,
    ) -> Tensor:
        """[rows, sequences, heads, dim] each -> [rows, sequences, heads * dim]."""
        context = attention_bias
        query, key, value = (states.permute(1, 2, 0, 3) for states in (query, key, value))
        # in fp32, the dtype of the angles
        query, key = apply_rotary_pos_emb(query, key, context.cos, context.sin)
        query, key = query.to(value.dtype), key.to(value.dtype)
        if context.visibility is not None:
            visible = {"pair_visibility": context.visibility, "scaling": self.scale}
            out = pair_attention(self, query, key, value, None, **visible)[0]
        else:
            # padding is on the right, so no scored row attends to it
            is_grouped = query.shape[1] != key.shape[1]
            out = F.scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=self.scale, enable_gqa=is_grouped
            ).transpose(1, 2)
        rows: Tensor = out.transpose(0, 1).flatten(2).contiguous()
        return rows


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


def decoder_spec(config: TransformerConfig, virtual_stage: int | None, pp_rank: int) -> TransformerBlockSubmodules:
    """The layers of one model chunk, and the final norm."""
    mlp = ModuleSpec(
        module=MLP, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    )
    if config.num_moe_experts:
        mlp = ModuleSpec(module=MoELayer, submodules=MoESubmodules(experts=StackedExperts, router=PairRouter))
    qk_norm = PairRMSNorm if config.qk_layernorm else IdentityOp
    attention = ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=PairCoreAttention,
            linear_proj=RowParallelLinear,
            q_layernorm=qk_norm,
            k_layernorm=qk_norm,
        ),
    )
    layer = ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=PairRMSNorm,
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=PairRMSNorm,
            mlp=mlp,
            mlp_bda=get_bias_dropout_add,
        ),
    )
    num_layers = get_num_layers_to_build(config, virtual_stage, pp_rank)
    return TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=PairRMSNorm)
