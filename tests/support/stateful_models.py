"""Tiny models of the families that have layers with state; each has every kind of layer that its family has."""

from __future__ import annotations

from transformers import AutoConfig, PreTrainedConfig

from tests.support.tiny_models import GROUPED

_DEPTH = {"num_hidden_layers": 4}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_DELTA = {
    "head_dim": 8,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 16, "mamba_n_groups": 2, "mamba_chunk_size": 16}
_CONVOLUTIONS = {"conv_L_cache": 3, "layer_types": ["conv", "full_attention", "conv", "conv"]}

_SETTINGS: dict[str, dict[str, object]] = {
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": {**_DELTA, **_EXPERTS, "shared_expert_intermediate_size": 16},
    "qwen3_next": {**_DELTA, **_EXPERTS, "shared_expert_intermediate_size": 16, "mlp_only_layers": [1]},
    "olmo_hybrid": {**_DELTA, "linear_allow_neg_eigval": True},
    "nemotron_h": {
        "head_dim": 8,
        "layers_block_type": ["linear_attention", "full_attention", "mlp", "linear_attention", "moe"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "ssm_state_size": 16,
        "n_groups": 2,
        "chunk_size": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 16,
        "moe_shared_expert_intermediate_size": 16,
    },
    "granitemoehybrid": {
        **_MAMBA,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 16,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "mamba_expand": 2,
        "position_embedding_type": "rope",
    },
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 64, "mamba_rms_norm": True, "mamba_norm_before_gate": False},
    "lfm2": _CONVOLUTIONS,
    "lfm2_moe": {**_CONVOLUTIONS, **_EXPERTS, "num_dense_layers": 2},
}

STATEFUL: dict[str, PreTrainedConfig] = {
    name: AutoConfig.for_model(name, **{**GROUPED, **_DEPTH, **settings}) for name, settings in _SETTINGS.items()
}
