"""Configs of published models, without their weights: the sizes in the config.json of each."""

from __future__ import annotations

from pathlib import Path

from transformers import DeepseekV3Config, LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3MoeConfig

from tests.support.small_runs import save_small_tokenizer


def _llama(hidden: int, intermediate: int, layers: int, heads: int) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=8192,
        architectures=["LlamaForCausalLM"],
    )


def _qwen(
    hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, vocab: int, *, tied: bool
) -> Qwen2Config:
    return Qwen2Config(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocab,
        tie_word_embeddings=tied,
        max_position_embeddings=32768,
        architectures=["Qwen2ForCausalLM"],
    )


def _qwen_with_experts() -> Qwen3MoeConfig:
    return Qwen3MoeConfig(
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        vocab_size=151936,
        norm_topk_prob=True,
        max_position_embeddings=40960,
        architectures=["Qwen3MoeForCausalLM"],
    )


def _deepseek() -> DeepseekV3Config:
    # the defaults of transformers are the model's
    return DeepseekV3Config(architectures=["DeepseekV3ForCausalLM"])


def config_of(name: str) -> PreTrainedConfig:
    """The config of a model by its published name."""
    configs = {
        "Qwen2.5-0.5B": lambda: _qwen(896, 4864, 24, 14, 2, 151936, tied=True),
        "Qwen2.5-3B": lambda: _qwen(2048, 11008, 36, 16, 2, 151936, tied=True),
        "Qwen2.5-32B": lambda: _qwen(5120, 27648, 64, 40, 8, 152064, tied=False),
        "Llama-3-8B": lambda: _llama(4096, 14336, 32, 32),
        "Llama-3-70B": lambda: _llama(8192, 28672, 80, 64),
        "Qwen3-30B-A3B": _qwen_with_experts,
        "DeepSeek-V3": _deepseek,
        "Llama-3.1-405B": lambda: _llama(16384, 53248, 126, 128),
    }
    return configs[name]()


# as the model cards count them
NUM_PARAMETERS = {
    "Qwen2.5-0.5B": 494_032_768,
    "Qwen2.5-3B": 3_085_938_688,
    "Qwen2.5-32B": 32_763_876_352,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Llama-3-8B": 8_030_261_248,
    "Llama-3-70B": 70_553_706_496,
    "Llama-3.1-405B": 405_853_388_800,
    "DeepSeek-V3": 671_026_404_352,
}


def save_config(directory: Path, name: str) -> Path:
    """Write config.json and a small tokenizer, if they are not there yet."""
    if not (directory / "config.json").exists():
        config_of(name).save_pretrained(directory)
        save_small_tokenizer(directory)
    return directory
