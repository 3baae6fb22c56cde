"""A small tokenizer with error-prone traits: tokenizer and template both write BOS, and EOS also ends turns."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from tokenizers.decoders import ByteLevel
from transformers import PreTrainedTokenizerFast

CORPUS = [
    "You are a helpful assistant. Why is the sky blue? Because of Rayleigh scattering of the light.",
    "Human: hello there Assistant: hello, how can I help you today? user assistant system tool",
    "one two three four five six seven eight nine ten, yes and no, good and bad, long and short answers",
]
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% if tools %}{{ '<|im_start|>tools\\n' + (tools | tojson) + '<|im_end|>\\n' }}{% endif %}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['thinking'] %}{{ '<think>' + message['thinking'] + '</think>' }}{% endif %}"
    "{{ message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def make_tokenizer(**special: Any) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer that adds BOS, as Llama's does, and has the ChatML tokens."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<s>", "</s>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS * 20, trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
    )
    tokens = {"bos_token": "<s>", "eos_token": "<|im_end|>", **special}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **tokens)
