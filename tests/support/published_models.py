"""Configs of published models, without their weights: the sizes in the config.json of each."""

from __future__ import annotations

from pathlib import Path

from transformers import (
    DeepseekV3Config,
    Gemma2Config,
    GemmaConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    NemotronHConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoHybridConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3MoeConfig,
    SmolLM3Config,
    Starcoder2Config,
)

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


def _smollm2() -> LlamaConfig:
    return LlamaConfig(
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=24,
        num_attention_heads=32,
        vocab_size=49152,
        tie_word_embeddings=True,
        max_position_embeddings=8192,
        architectures=["LlamaForCausalLM"],
    )


def _starcoder2() -> Starcoder2Config:
    return Starcoder2Config(
        hidden_size=6144,
        intermediate_size=24576,
        num_hidden_layers=40,
        num_attention_heads=48,
        num_key_value_heads=4,
        vocab_size=49152,
        bos_token_id=0,
        eos_token_id=0,
        tie_word_embeddings=False,
        sliding_window=4096,
        max_position_embeddings=16384,
        architectures=["Starcoder2ForCausalLM"],
    )


def _mixtral() -> MixtralConfig:
    return MixtralConfig(
        hidden_size=6144,
        intermediate_size=16384,
        num_hidden_layers=56,
        num_attention_heads=48,
        num_key_value_heads=8,
        vocab_size=32000,
        max_position_embeddings=65536,
        architectures=["MixtralForCausalLM"],
    )


def _olmo2(hidden: int, intermediate: int, layers: int) -> Olmo2Config:
    return Olmo2Config(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=layers,
        vocab_size=100352,
        max_position_embeddings=4096,
        architectures=["Olmo2ForCausalLM"],
    )


def _olmo3(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int) -> Olmo3Config:
    return Olmo3Config(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=100278,
        max_position_embeddings=65536,
        architectures=["Olmo3ForCausalLM"],
    )


def _gemma2() -> Gemma2Config:
    return Gemma2Config(
        hidden_size=3584,
        intermediate_size=14336,
        num_hidden_layers=42,
        num_attention_heads=16,
        num_key_value_heads=8,
        architectures=["Gemma2ForCausalLM"],
    )


def _nemotron() -> NemotronHConfig:
    layers = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
    return NemotronHConfig(
        hidden_size=2688,
        layers_block_type=[{"M": "mamba", "E": "moe", "*": "attention"}[layer] for layer in layers],
        n_routed_experts=128,
        num_experts_per_tok=6,
        intermediate_size=1856,
        moe_intermediate_size=1856,
        moe_shared_expert_intermediate_size=3712,
        num_attention_heads=32,
        num_key_value_heads=2,
        mamba_num_heads=64,
        max_position_embeddings=262144,
        architectures=["NemotronHForCausalLM"],
    )


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
        "Qwen2.5-7B": lambda: _qwen(3584, 18944, 28, 28, 4, 152064, tied=False),
        "Mistral-7B": lambda: MistralConfig(vocab_size=32000, architectures=["MistralForCausalLM"]),
        "Mixtral-8x22B": _mixtral,
        "Gemma-7B": lambda: GemmaConfig(architectures=["GemmaForCausalLM"]),
        "Gemma-2-9B": _gemma2,
        "StarCoder2-15B": _starcoder2,
        "SmolLM2-1.7B": _smollm2,
        "SmolLM3-3B": lambda: SmolLM3Config(max_position_embeddings=65536, architectures=["SmolLM3ForCausalLM"]),
        "OLMo-2-7B": lambda: _olmo2(4096, 11008, 32),
        "OLMo-2-13B": lambda: _olmo2(5120, 13824, 40),
        "Olmo-3-7B": lambda: _olmo3(4096, 11008, 32, 32, 32),
        "Olmo-3-32B": lambda: _olmo3(5120, 27648, 64, 40, 8),
        "Olmo-Hybrid-7B": lambda: OlmoHybridConfig(architectures=["OlmoHybridForCausalLM"]),
        "Nemotron-3-Nano-30B-A3B": _nemotron,
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
    "Qwen2.5-7B": 7_615_616_512,
    "Mistral-7B": 7_241_732_096,
    "Mixtral-8x22B": 140_620_634_112,
    "Gemma-7B": 8_537_680_896,
    "Gemma-2-9B": 9_241_705_984,
    "StarCoder2-15B": 15_957_889_024,
    "SmolLM2-1.7B": 1_711_376_384,
    "SmolLM3-3B": 3_075_098_624,
    "OLMo-2-7B": 7_298_617_344,
    "OLMo-2-13B": 13_716_198_400,
    "Olmo-3-7B": 7_298_011_136,
    "Olmo-3-32B": 32_233_522_176,
    "Olmo-Hybrid-7B": 7_430_870_688,
    "Nemotron-3-Nano-30B-A3B": 31_577_937_344,
}


def save_config(directory: Path, name: str) -> Path:
    """Write config.json and a small tokenizer, if they are not there yet."""
    if not (directory / "config.json").exists():
        config_of(name).save_pretrained(directory)
        save_small_tokenizer(directory)
    return directory
