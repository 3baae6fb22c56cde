"""Tokenized real pairs for measurements: HH-RLHF, UltraFeedback or polite-against-rude, with a BPE of any size.

The tokenizer is trained on the same text, so that token counts are realistic for the vocabulary size.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from thresher.data.batching.plan import Plan
from thresher.data.example import Example

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"
Texts = list[tuple[str, str, str]]


def hh_texts(name: str = "helpful-base") -> Texts:
    """The prompt is the conversation up to the last "Assistant:"."""
    with gzip.open(SHARED / "hh-rlhf-test" / f"{name}.test.jsonl.gz", "rt") as lines:
        rows = [json.loads(line) for line in lines]
    texts = []
    for row in rows:
        start = row["chosen"].rfind("\n\nAssistant:") + len("\n\nAssistant:")
        prompt, chosen = row["chosen"][:start], row["chosen"][start:]
        if row["rejected"].startswith(prompt) and chosen.strip() and row["rejected"][start:].strip():
            texts.append((prompt, chosen, row["rejected"][start:]))
    return texts


def ultrafeedback_texts() -> Texts:
    rows = map(json.loads, (SHARED / "ultrafeedback-subset" / "uf_train_clean.jsonl").read_text().splitlines())
    return [(r["prompt"], r["chosen"], r["rejected"]) for r in rows if r["chosen"] and r["rejected"]]


def polite_texts() -> Texts:
    rows = json.loads((SHARED / "rasbt-preference" / "instruction-data-with-preference.json").read_text())
    return [(f"{r['instruction']}\n{r['input']}\n", r["chosen"], r["rejected"]) for r in rows]


DATA = {"hh": hh_texts, "ultrafeedback": ultrafeedback_texts, "polite": polite_texts}


def train_bpe(texts: Texts, vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<pad>", "<bos>", "<eos>"]
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(_all_texts(texts), trainer)
    return tokenizer


def _all_texts(texts: Texts) -> Iterator[str]:
    for row in texts:
        yield from row


def in_plan_order(pairs: list[Example], plan: Plan) -> list[Example]:
    """Reorder the pairs so that the steps of the plan visit them in the order of the data."""
    numbered = list(pairs)
    visited = np.concatenate([plan.pair_ids(step) for step in range(plan.num_steps)])
    for place, pair in zip(visited.tolist(), pairs, strict=True):
        numbered[place] = pair
    return numbered


def token_pairs(texts: Texts, tokenizer: Tokenizer, *, max_length: int) -> list[Example]:
    """Tokenize each pair, with <bos> before the prompt and <eos> after the responses; drop pairs that are too long."""
    pairs = []
    for row in texts:
        prompt, chosen, rejected = (tokenizer.encode(text).ids for text in row)
        if 1 + len(prompt) + max(len(chosen), len(rejected)) + 1 <= max_length and chosen != rejected:
            ids = ([1, *prompt], [*chosen, 2], [*rejected, 2])
            pairs.append(Example.pair(*(np.array(side, dtype=np.int32) for side in ids)))
    return pairs
