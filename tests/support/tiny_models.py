"""Causal language models of many families with random weights, small enough to build in milliseconds."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3Config,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    Gemma4Config,
    Gemma4TextConfig,
    Glm4MoeConfig,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MiMoV2FlashConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Olmo3Config,
    OPTConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from thresher.data.example import Example, ExampleBatch

VOCAB = 96
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {**SHAPE, "num_key_value_heads": 2}
_WINDOWS = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
# the last two layers use the keys and values of the first two
_SHARED_KEYS = {
    **GROUPED,
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 6,
    "head_dim": 8,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 8,
}
_VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}

FAMILIES: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**GROUPED),
    "qwen2": Qwen2Config(**GROUPED, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**GROUPED, head_dim=8),
    "mistral": MistralConfig(**GROUPED, sliding_window=6),
    "gemma2": Gemma2Config(**GROUPED, head_dim=8, final_logit_softcapping=2.0, sliding_window=6),
    "gemma3_text": Gemma3TextConfig(**GROUPED, head_dim=8, sliding_window=6, final_logit_softcapping=None),
    # as the hub has it: the text config inside a multimodal one
    "gemma3": Gemma3Config(
        text_config={**GROUPED, **_WINDOWS, "head_dim": 8, "final_logit_softcapping": None},
        vision_config={**_VISION, "image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
    ),
    "gemma3n_text": Gemma3nTextConfig(**_SHARED_KEYS, laurel_rank=8, altup_num_inputs=2),
    "gemma4_text": Gemma4TextConfig(**_SHARED_KEYS, global_head_dim=16),
    "gemma4": Gemma4Config(
        text_config={**_SHARED_KEYS, "global_head_dim": 16},
        vision_config={**_VISION, "num_key_value_heads": 2, "head_dim": 8},
        audio_config=None,
    ),
    "phi3": Phi3Config(**GROUPED),
    "gpt_neox": GPTNeoXConfig(**SHAPE, attention_dropout=0.5, hidden_dropout=0.5),
    "olmo2": Olmo2Config(**GROUPED),
    "olmo3": Olmo3Config(**GROUPED, **_WINDOWS),
    "granite": GraniteConfig(**GROUPED, logits_scaling=8.0, embedding_multiplier=12.0, residual_multiplier=0.22),
    "cohere": CohereConfig(**GROUPED, logit_scale=0.25, attention_dropout=0.5),
    "qwen2_windowed": Qwen2Config(**GROUPED, use_sliding_window=True, sliding_window=6, max_window_layers=0),
    "phi3_windowed": Phi3Config(**GROUPED, sliding_window=6),
    "mixtral_windowed": MixtralConfig(**GROUPED, num_local_experts=4, num_experts_per_tok=2, sliding_window=6),
    # its attention module does not know the window, which is only in the mask
    "qwen2_moe_windowed": Qwen2MoeConfig(
        **GROUPED,
        **_WINDOWS,
        use_sliding_window=True,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    ),
    # attention sinks: in every layer, and in the layers with a window only
    "gpt_oss": GptOssConfig(**GROUPED, head_dim=8, sliding_window=6, num_local_experts=4, num_experts_per_tok=2),
    "mimo_v2_flash": MiMoV2FlashConfig(
        **GROUPED,
        **_WINDOWS,
        head_dim=8,
        v_head_dim=4,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
    ),
    "llama_stray_window": LlamaConfig(**GROUPED, sliding_window=6),
    "qwen3_moe": Qwen3MoeConfig(**GROUPED, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16),
    "mixtral": MixtralConfig(**GROUPED, num_local_experts=4, num_experts_per_tok=2, router_jitter_noise=0.5),
    "opt": OPTConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        ffn_dim=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
        word_embed_proj_dim=32,
        dropout=0.5,
        attention_dropout=0.5,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    ),
}


_DEEPSEEK = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
FAMILIES |= {
    "glm4_moe": Glm4MoeConfig(**GROUPED, **_DEEPSEEK, first_k_dense_replace=0, n_group=1, topk_group=1),
    "deepseek_v3": DeepseekV3Config(
        **(GROUPED | {"num_key_value_heads": 4}),
        **_DEEPSEEK,
        first_k_dense_replace=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        n_group=1,
        topk_group=1,
    ),
}
# with STATEFUL
EXPERT_FAMILIES = ("qwen3_moe", "qwen3_5_moe_text", "mixtral", "deepseek_v3", "glm4_moe", "gpt_oss")


def tiny_model(family: str, seed: int = 0) -> PreTrainedModel:
    """Build a model whose logits vary enough to reveal errors."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(FAMILIES[family]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0.0, 0.3)
            elif name.endswith("sinks"):
                parameter.normal_()
    return model


def pair_of(
    prompt: int, chosen: int, rejected: int, *, seed: int = 0, masks: tuple[Sequence[int], Sequence[int]] | None = None
) -> Example:
    """Make a pair of random tokens with these lengths; masks have 1 for a scored token."""
    rng = np.random.default_rng(seed)
    sides = [rng.integers(3, VOCAB, length).astype(np.int32) for length in (prompt, chosen, rejected)]
    scored = [None, None] if masks is None else [np.array(mask, dtype=bool) for mask in masks]
    return Example.pair(*sides, *scored)


def replace_side(
    pair: Example, side: int, *, ids: npt.NDArray[np.int32] | None = None, mask: npt.NDArray[np.bool_] | None = None
) -> Example:
    """The same pair with other tokens, or another mask, on one side."""
    responses = list(pair.responses)
    response = responses[side]
    responses[side] = response._replace(ids=response.ids if ids is None else ids, mask=mask)
    return replace(pair, responses=tuple(responses))


def batch_of(*pairs: Example) -> ExampleBatch:
    return ExampleBatch(np.arange(len(pairs)), pairs)


# a one-token prompt, long and short sides, and masks that exclude first, last and inner tokens
MIXED = batch_of(
    pair_of(1, 4, 2, seed=1),
    pair_of(7, 3, 9, seed=2),
    pair_of(3, 5, 4, seed=3, masks=([0, 1, 1, 0, 1], [1, 0, 0, 0])),
)
