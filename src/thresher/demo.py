"""What `thresher demo` runs: the quickstart, with its tiny model, its pairs and its config in one directory."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TRAIN, VALIDATION = "train.jsonl", "validation.jsonl"
# in a wheel, or in a checkout
_PLACES = (Path(__file__).with_name("quickstart"), Path(__file__).parents[2] / "examples" / "quickstart")
_FILES = next(path for path in _PLACES if path.is_dir())
_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>\n' + message['content'] + '<|end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
_HEADER = """\
# Written by `thresher demo`. Change it and run it again:
#   thresher train {config} output_dir={other_run}
"""
# for more than the quickstart's pairs and its tiny model
_LONGER = {"sequence_length: 256": "sequence_length: 512", "num_train_epochs: 2": "max_steps: 40"}
_PRETRAINED = {"dtype: fp32": "dtype: bf16", "learning_rate: 2.0e-4 ": "learning_rate: 1.0e-6 "}


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer on the training pairs; it encodes any other text too."""
    rows = [json.loads(line) for line in (_FILES / TRAIN).read_text(encoding="utf-8").splitlines()]
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
        tokenizer_object=backend,
        eos_token="<|end|>",  # noqa: S106
        pad_token="<|pad|>",  # noqa: S106
        chat_template=_CHAT_TEMPLATE,
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Make a Llama with 0.6 million random weights, the same ones every time."""
    with torch.random.fork_rng(devices=[]):
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


def copy_pairs(directory: Path) -> Path:
    """Copy the training and validation pairs; return the training file."""
    for name in (TRAIN, VALIDATION):
        shutil.copyfile(_FILES / name, directory / name)
    return directory / TRAIN


def write_config(directory: Path, *, model: str | None, data: Sequence[str]) -> Path:
    """Write dpo_config.yaml: the quickstart's config for a run in this directory.

    Args:
        model: A pretrained model, with more weights and less room for a high learning rate; None is the tiny one.
        data: Files, of which a tenth of the pairs is held out; without any, the quickstart's pairs.
    """
    path = directory / "dpo_config.yaml"
    held_out = f"{{file_name: {_quoted(directory / VALIDATION)}}}"
    changes = {
        "output/quickstart/model": _quoted(model or directory / "model"),
        "output/quickstart/run": _quoted(directory / "run"),
        "examples/quickstart/train.jsonl": _quoted([*data] or [str(directory / TRAIN)]),
        "data_args: {file_name: examples/quickstart/validation.jsonl}": "split: 0.1"
        if data
        else f"data_args: {held_out}",
        **(_LONGER if model or data else {}),
        **(_PRETRAINED if model else {}),
    }
    text = (_FILES / "config.yaml").read_text(encoding="utf-8")
    text = re.sub("|".join(map(re.escape, changes)), lambda found: changes[found[0]], text)
    text = _HEADER.format(config=path, other_run=directory / "run2") + text
    path.write_text(text, encoding="utf-8")
    return path


def _quoted(value: object) -> str:
    """Write a path or a list of names as JSON, which is YAML on one line."""
    return json.dumps(value if isinstance(value, list) else str(value), ensure_ascii=False)
