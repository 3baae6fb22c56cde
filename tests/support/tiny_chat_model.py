"""A tiny Llama with a chat tokenizer, and text pairs for it: made here, so every clone has them."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from tests.support.paths import ROOT
from tests.support.small_tokenizer import CHAT_TEMPLATE, make_tokenizer

PAIRS = ROOT / "examples" / "quickstart" / "train.jsonl"


def save_tiny_chat_model(directory: Path) -> Path:
    """Save a Llama of 136 thousand weights, the same ones every time, with the tokenizer of `small_tokenizer`.

    Three layers, grouped-query attention and tied embeddings. Its logps of the pairs below are -7.4 on average with a
    standard deviation of 1.7, so a shifted, skipped or swapped token changes every sum.
    """
    tokenizer = make_tokenizer(pad_token="</s>")
    tokenizer.chat_template = CHAT_TEMPLATE
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        dtype="float32",
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.2,  # at the default of 0.02, all tokens have nearly the same probability
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.normal_(1.0, 0.1)  # norms of 1 would hide a norm whose weight is not applied
    tokenizer.save_pretrained(directory)
    config.save_pretrained(directory)
    model.generation_config.save_pretrained(directory)
    # not model.save_pretrained: it imports deepspeed, which takes longer than all the rest
    weights = {name: weight for name, weight in model.state_dict().items() if name != "lm_head.weight"}  # tied
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def quickstart_rows(count: int) -> list[dict[str, str]]:
    """Read the first pairs of the quickstart: responses of 7 to 137 tokens, and the longer one is not always chosen."""
    lines = PAIRS.read_text(encoding="utf-8").splitlines()[:count]
    return [{**row, "prompt": row["prompt"] + "\n"} for row in map(json.loads, lines)]
