"""Make the model of the quickstart: a Llama of 0.6 million random weights, with a tokenizer of its data.

    python examples/quickstart/make_tiny_model.py output/quickstart/model

The same files every time, without a download. The model knows nothing yet: it shows how a run works and that the
preferences are learned, not how good its answers are. For a real model, set `pretrain` in the config instead.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

DATA = Path(__file__).with_name("train.jsonl")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>\n' + message['content'] + '<|end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer on the texts of the training pairs; it encodes any other text too."""
    rows = [json.loads(line) for line in DATA.read_text(encoding="utf-8").splitlines()]
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1024,
        special_tokens=["<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator((text for row in rows for text in row.values()), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|end|>", pad_token="<|pad|>", chat_template=CHAT_TEMPLATE
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=512,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/quickstart/make_tiny_model.py DIRECTORY")
    disable_progress_bar()
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    tokenizer.save_pretrained(sys.argv[1])
    model.save_pretrained(sys.argv[1])
    print(f"{sys.argv[1]}: {model.num_parameters():,} parameters, {len(tokenizer):,} tokens")
