"""thresher against TRL on the same pairs: one thread, contestants in turn on every batch, ratios with their spread.

python benchmarks/vs_trl.py                      # all columns of docs/benchmarks.md on HH
python benchmarks/vs_trl.py --columns h384-L6-V8k-fp32 --batches 12 --data ultrafeedback
"""

from __future__ import annotations

import argparse
import os
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np
import torch
from contestants import (
    COLUMNS,
    Column,
    Step,
    bare_step,
    check_losses,
    layouts,
    reference_seconds,
    thresher_step,
    thresher_trainer,
    trl_step,
)
from datasets import disable_progress_bars
from pairs import DATA, token_pairs, train_bpe
from transformers import PreTrainedTokenizerFast
from transformers.utils import logging

from thresher.assembly.run import AUTO_TOKENS
from thresher.data.plan import Plan

BASE = "TRL default (checkpointing)"
STRONGEST = "TRL, no checkpointing, reference precomputed, GPU head forced"


def build(
    column: Column, data: str, num_batches: int, pairs_per_step: int, max_length: int
) -> tuple[dict[str, Step], float]:
    texts = DATA[data]()
    bpe = train_bpe(texts, column.vocab)
    pairs = token_pairs(texts, bpe, max_length=max_length)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")
    plan = Plan(len(pairs), seed=0, pairs_per_step=pairs_per_step, num_steps=num_batches + 1)
    ways = layouts()
    trainers = {
        name: thresher_trainer(column, pairs, plan, layout, max_tokens, checkpointing=checkpointing)
        for name, layout, max_tokens, checkpointing in (
            ("thresher", ways["shared"], AUTO_TOKENS, False),
            ("thresher, checkpointing", ways["shared"], AUTO_TOKENS, True),
            ("thresher, packed", ways["packed"], AUTO_TOKENS, False),
            ("thresher, padded", ways["padded"], None, False),
        )
    }
    reference = trainers["thresher, padded"]._train.reference
    steps = {
        BASE: trl_step(column, tokenizer, pairs, plan, checkpointing=True, reference=None, force_compact_head=False),
        "TRL, no checkpointing": trl_step(
            column, tokenizer, pairs, plan, checkpointing=False, reference=None, force_compact_head=False
        ),
        "TRL, no checkpointing, reference precomputed": trl_step(
            column, tokenizer, pairs, plan, checkpointing=False, reference=reference, force_compact_head=False
        ),
        STRONGEST: trl_step(
            column, tokenizer, pairs, plan, checkpointing=False, reference=reference, force_compact_head=True
        ),
        "bare loop, shared": bare_step(column, pairs, plan, trainers["thresher"]._train.reference, ways["shared"]),
    }
    steps |= {name: thresher_step(trainer) for name, trainer in trainers.items()}
    return steps, reference_seconds(column, pairs, plan, ways["shared"])


def measure(steps: dict[str, Step], num_batches: int) -> dict[str, np.ndarray]:
    """Seconds of every contestant on every batch; they go in turn, each time from another one on."""
    names = list(steps)
    seconds = {name: np.zeros(num_batches) for name in names}
    for batch in range(num_batches):
        for name in names[batch % len(names) :] + names[: batch % len(names)]:
            started = time.perf_counter()
            steps[name](batch + 1)
            seconds[name][batch] = time.perf_counter() - started
    return seconds


def report(title: str, seconds: dict[str, np.ndarray]) -> None:
    print(f"\n{title}\n")
    print(
        "| mode | s/step | x TRL default: median (quartiles) | x strongest TRL | x bare loop |\n|---|---|---|---|---|"
    )
    for name, own in seconds.items():
        ratios = [seconds[other] / own for other in (BASE, STRONGEST, "bare loop, shared")]
        low, middle, high = np.percentile(ratios[0], [25, 50, 75])
        print(
            f"| {name} | {np.median(own):.3f} | {middle:.2f} ({low:.2f}-{high:.2f}) | {np.median(ratios[1]):.2f} | "
            f"{np.median(ratios[2]):.2f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--columns", nargs="+", default=list(COLUMNS), choices=COLUMNS)
    parser.add_argument("--batches", type=int, default=16)
    parser.add_argument("--data", default="hh", choices=DATA)
    parser.add_argument("--pairs-per-step", type=int, default=8)
    parser.add_argument("--max-length", type=int, default=1024)
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    disable_progress_bars()
    for key in args.columns:
        column = COLUMNS[key]
        steps, seconds_of_reference = build(column, args.data, args.batches, args.pairs_per_step, args.max_length)
        first = {name: step(0) for name, step in steps.items()}
        check_losses(first, 1e-5 if column.dtype == torch.float32 else 2e-3)
        seconds = measure(steps, args.batches)
        # a reference scored in advance is paid once, in the first epoch; TRL's default pays it in every step
        seconds["thresher, first epoch (reference included)"] = seconds["thresher"] + seconds_of_reference
        report(f"{column.name}, {args.data}, {args.batches} batches of {args.pairs_per_step} pairs", seconds)


if __name__ == "__main__":
    main()
