"""Families that the start-up probe is tested on, each with the default config of its class, and what it finds."""

from __future__ import annotations

from transformers import CONFIG_MAPPING, PreTrainedConfig

# model type: name in the docs
PACKED = {
    "llama": "Llama",
    "qwen2": "Qwen2, Qwen2.5",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3-MoE",
    "mistral": "Mistral",
    "ministral3": "Ministral 3",
    "mixtral": "Mixtral",
    "gemma2": "Gemma 2",
    "gemma3_text": "Gemma 3 (text)",
    "gemma3": "Gemma 3 (multimodal, text pairs)",
    "gemma3n_text": "Gemma 3n (text)",
    "gemma4_text": "Gemma 4 (text)",
    "gemma4": "Gemma 4 (multimodal, text pairs)",
    "phi3": "Phi-3",
    "olmo3": "OLMo 3",
    "cohere2": "Cohere 2",
    "exaone4": "EXAONE 4",
    "smollm3": "SmolLM3",
    "deepseek_v3": "DeepSeek-V3",
    "glm4": "GLM-4",
    "glm4_moe": "GLM-4.5 (MoE)",
    "minimax_m2": "MiniMax-M2",
    "gpt_oss": "gpt-oss",
    "mimo_v2_flash": "MiMo-V2-Flash",
    "granite_swa": "Granite with sliding windows",
    "seed_oss": "Seed-OSS",
    "ernie4_5": "ERNIE 4.5",
    "apertus": "Apertus",
    "hunyuan_v1_dense": "Hunyuan dense",
    "qwen2_moe": "Qwen2-MoE",
    "gpt_neox": "GPT-NeoX",
    "olmo2": "OLMo 2",
    "granite": "Granite",
    "cohere": "Cohere",
    "opt": "OPT",
    "qwen3_5": "Qwen3.5 (multimodal, text pairs)",
    "qwen3_5_text": "Qwen3.5",
    "qwen3_5_moe": "Qwen3.5-MoE (multimodal, text pairs)",
    "qwen3_5_moe_text": "Qwen3.5-MoE",
    "qwen3_next": "Qwen3-Next",
    "olmo_hybrid": "OLMo hybrid",
    "nemotron_h": "Nemotron-H",
    "granitemoehybrid": "Granite 4",
    "falcon_h1": "Falcon-H1",
    "bamba": "Bamba",
    "zamba2": "Zamba2",
    "lfm2": "LFM2",
    "lfm2_moe": "LFM2-MoE",
}
# what the defaults of a class leave out, as the published models have it
_PUBLISHED: dict[str, dict[str, object]] = {
    "granitemoehybrid": {"layer_types": ["linear_attention"] * 31 + ["full_attention"], "num_local_experts": 64},
    "bamba": {"attn_layer_indices": [9, 18, 27]},
    "hunyuan_v1_dense": {
        "head_dim": 128,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 1e3, "factor": 1.0},
    },
    "lfm2_moe": {"layer_types": (["conv"] * 3 + ["full_attention"]) * 8},
}
SINKS = ("gpt_oss", "mimo_v2_flash", "granite_swa")
# and what packed rows lack
PADDED = {
    "llama4_text": ("Llama 4 (text)", "the model family llama4_text attends within chunks of a sequence"),
    "llama4": ("Llama 4 (multimodal, text pairs)", "the model family llama4 attends within chunks of a sequence"),
    "doge": (
        "Doge",
        "layout `shared` does not work with model family `doge` (the model makes its own attention mask, which packed "
        "rows do not have)",
    ),
    "bloom": ("BLOOM", "the model family bloom does not use transformers' attention interface"),
}


def default_config(model_type: str) -> PreTrainedConfig:
    config: PreTrainedConfig = CONFIG_MAPPING[model_type](**_PUBLISHED.get(model_type, {}))
    return config
