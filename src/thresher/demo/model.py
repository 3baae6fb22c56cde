"""The model of the demo: a small Llama and its tokenizer, pretrained within seconds on the sentences of the demo.

It answers in either tone equally often, so that a preference between them is visible in its answers. This pretraining
is plain next-token prediction; preferences are learned by the run that follows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from thresher.demo.pairs import Pair, make_pairs

if TYPE_CHECKING:
    from torch import Tensor

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
_VOCABULARY = 512
NUM_STEPS = 200
_SEQUENCES_PER_STEP, _LEARNING_RATE = 24, 4e-3


def make_tokenizer(pairs: Sequence[Pair]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer on the sentences; it encodes any other text too."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=["<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator((text for pair in pairs for text in pair), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|end|>",  # noqa: S106
        pad_token="<|pad|>",  # noqa: S106
        chat_template=CHAT_TEMPLATE,
    )


def make_model(
    directory: Path, show_progress: Callable[[str, int, int], None], num_steps: int = NUM_STEPS
) -> LlamaForCausalLM:
    """Pretrain the model on all answers of both tones, and save it with its tokenizer."""
    train, validation = make_pairs()
    tokenizer = make_tokenizer([*train, *validation])
    sequences = _encode(tokenizer, [*train, *validation])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=len(tokenizer),
                hidden_size=128,
                intermediate_size=256,
                num_hidden_layers=3,
                num_attention_heads=4,
                max_position_embeddings=1024,
                tie_word_embeddings=True,
                bos_token_id=None,
                eos_token_id=tokenizer.eos_token_id,
                pad_token_id=tokenizer.pad_token_id,
            )
        )
        _pretrain(model, sequences, num_steps, show_progress)
    tokenizer.save_pretrained(directory)
    model.save_pretrained(directory)
    return model


def _encode(tokenizer: PreTrainedTokenizerFast, pairs: Sequence[Pair]) -> Tensor:
    """Render and pad every question with each of its answers: (sequences, tokens)."""
    conversations = [
        [{"role": "user", "content": pair.prompt}, {"role": "assistant", "content": answer}]
        for pair in pairs
        for answer in (pair.chosen, pair.rejected)
    ]
    texts = [str(tokenizer.apply_chat_template(each, tokenize=False)) for each in conversations]
    encoded: Tensor = tokenizer(texts, padding=True, add_special_tokens=False, return_tensors="pt")["input_ids"]
    return encoded


def _pretrain(
    model: LlamaForCausalLM, sequences: Tensor, num_steps: int, show_progress: Callable[[str, int, int], None]
) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=_LEARNING_RATE, total_steps=num_steps)
    padding = model.config.pad_token_id or 0
    for step in range(num_steps):
        batch = sequences[torch.randint(len(sequences), (_SEQUENCES_PER_STEP,))]
        is_token = batch.ne(padding)
        output = model(input_ids=batch, attention_mask=is_token.long(), labels=batch.where(is_token, -100))
        output.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        show_progress(f"pretraining a small model, loss {output.loss.item():.2f}, steps", step + 1, num_steps)
