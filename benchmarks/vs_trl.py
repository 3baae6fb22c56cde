"""Measure thresher against TRL on the same pairs: one thread, contestants in turn on every batch, ratios per batch.

python benchmarks/vs_trl.py                      # all models of docs/internals/benchmarks.md on HH
python benchmarks/vs_trl.py --columns h384-L6-V8k-fp32 --batches 12 --data ultrafeedback
python benchmarks/vs_trl.py --only "TRL default" "thresher"
--results FILE.json saves the results after each model; `python benchmarks/chart.py FILE.json OUTPUT.svg` draws them.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import mkdtemp

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
    score_reference,
    thresher_step,
    thresher_trainer,
    trl_step,
    write_store,
)
from datasets import disable_progress_bars
from flops import Rows, matmul_peak, products_only_seconds, useful_flops
from pairs import DATA, in_plan_order, token_pairs, train_bpe
from transformers import PreTrainedTokenizerFast
from transformers.utils import logging

from thresher.data.batching.plan import Plan
from thresher.data.example import Example

BASE = "TRL default (checkpointing)"
STRONGEST = "TRL, no checkpointing, reference precomputed, GPU head forced"
BARE = "bare loop, shared"
# sums of about 450 nats in fp32 have a resolution of 3e-5; times beta, TRL's reference forward moves a loss by 1e-5
FP32_TOLERANCE = 2e-5


class Field:
    """The pairs and all contestants; a contestant is built on demand."""

    def __init__(self, column: Column, data: str, num_batches: int, pairs_per_step: int, max_length: int):
        texts = DATA[data]()
        bpe = train_bpe(texts, column.vocab)
        wanted = (num_batches + 1) * pairs_per_step
        pairs = token_pairs(texts, bpe, max_length=max_length)[:wanted]
        if len(pairs) < wanted:
            raise SystemExit(
                f"{data} has {len(pairs)} pairs of at most {max_length} tokens, {wanted} are needed; "
                "lower --batches or raise --max-length"
            )
        self.column = column
        self.plan = Plan(len(pairs), seed=0, pairs_per_step=pairs_per_step, num_steps=num_batches + 1)
        self.pairs = in_plan_order(pairs, self.plan)
        self.store = write_store(self.pairs, Path(mkdtemp()) / "store")
        self.reference = score_reference(column, self.store, self.plan)
        self.tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=bpe, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
        )

    def contestants(self) -> dict[str, Callable[[], Step]]:
        shared, packed, padded = (layouts()[name] for name in ("shared", "packed", "padded"))
        return {
            BASE: lambda: self._trl(checkpointing=True),
            "TRL, no checkpointing": self._trl,
            "TRL, no checkpointing, reference precomputed": lambda: self._trl(precomputed=True),
            STRONGEST: lambda: self._trl(precomputed=True, force_compact_head=True),
            BARE: lambda: bare_step(self.column, self.pairs, self.plan, self.reference, shared),
            "thresher": lambda: self._thresher(shared),
            "thresher, torch_compile": lambda: self._thresher(shared, compiled=True),
            "thresher, checkpointing": lambda: self._thresher(shared, checkpointing=True),
            "thresher, packed": lambda: self._thresher(packed),
            "thresher, padded": lambda: self._thresher(padded),
        }

    def _trl(self, *, checkpointing: bool = False, precomputed: bool = False, force_compact_head: bool = False) -> Step:
        return trl_step(
            self.column,
            self.tokenizer,
            self.pairs,
            self.plan,
            checkpointing=checkpointing,
            reference=self.reference if precomputed else None,
            force_compact_head=force_compact_head,
        )

    def _thresher(self, layout, **settings: bool) -> Step:
        trainer = thresher_trainer(self.column, self.store, self.plan, layout, self.reference, **settings)
        return thresher_step(trainer)

    def pairs_of(self, batch: int) -> list[Example]:
        return [self.pairs[i] for i in self.plan.pair_ids(batch)]


def measure(steps: dict[str, Step], num_batches: int) -> dict[str, np.ndarray]:
    """Time every contestant on every batch; they take turns, and each batch starts with another one."""
    names = list(steps)
    seconds = {name: np.zeros(num_batches) for name in names}
    for batch in range(num_batches):
        for name in names[batch % len(names) :] + names[: batch % len(names)]:
            started = time.perf_counter()
            steps[name](batch + 1)
            seconds[name][batch] = time.perf_counter() - started
    return seconds


def useful_share(field: Field, seconds: dict[str, np.ndarray], num_batches: int) -> tuple[dict[str, float], float]:
    """Return useful FLOPs relative to the machine's fastest product, by contestant, and the ceiling of the shapes."""
    flops = np.array([useful_flops(field.column, field.pairs_of(batch + 1)) for batch in range(num_batches)])
    peak = matmul_peak(field.column.dtype)
    shares = {name: float(np.median(flops / own) / peak) for name, own in seconds.items()}
    middle = field.pairs_of(1 + int(np.argsort(flops)[num_batches // 2]))
    scored = sum(len(pair.chosen.ids) + len(pair.rejected.ids) for pair in middle)
    rows = scored + sum(len(pair.prompt_ids) for pair in middle)
    ceiling = float(np.median(flops)) / products_only_seconds(field.column, rows, scored) / peak
    print(f"\nfastest product {peak / 1e9:.0f} GFLOP/s; useful {np.median(flops) / 1e9:.0f} GFLOP per step")
    print(f"the step's matrix products alone reach {ceiling:.2f} of it")
    return shares, ceiling


def report_rows(field: Field, num_batches: int) -> None:
    counts = [Rows.of(field.column, field.pairs_of(batch + 1)) for batch in range(num_batches)]
    padded, shared, scored = (np.median([getattr(c, name) for c in counts]) for name in ("padded", "shared", "scored"))
    times, ratio = np.median([c.padded / c.shared for c in counts]), np.median([c.ratio for c in counts])
    print(f"rows per step: {padded:.0f} padded, {shared:.0f} shared ({times:.2f} times fewer), {scored:.0f} scored")
    print(f"multiply-adds with weights, the strongest TRL over thresher: {ratio:.2f}")


def report(title: str, seconds: dict[str, np.ndarray], shares: dict[str, float]) -> None:
    others = [name for name in (BASE, STRONGEST, BARE) if name in seconds]
    print(f"\n{title}\n\n| mode | s/step | useful |", *(f" x {name}: median (quartiles) |" for name in others), sep="")
    print("|---|---|---|" + "---|" * len(others))
    for name, own in seconds.items():
        cells = []
        for other in others:
            low, middle, high = np.percentile(seconds[other] / own, [25, 50, 75])
            cells.append(f" {middle:.2f} ({low:.2f}-{high:.2f}) |")
        print(f"| {name} | {np.median(own):.3f} | {shares[name]:.2f} |", *cells, sep="")


def keep(results: Path, title: str, seconds: dict[str, np.ndarray], shares: dict[str, float], ceiling: float) -> None:
    known = json.loads(results.read_text()) if results.exists() else {}
    known[title] = {
        "seconds": {name: own.tolist() for name, own in seconds.items()},
        "useful": shares,
        "useful, products alone": ceiling,
    }
    results.write_text(json.dumps(known, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--columns", nargs="+", default=list(COLUMNS), choices=COLUMNS)
    parser.add_argument("--batches", type=int, default=8)
    parser.add_argument("--data", default="hh", choices=DATA)
    parser.add_argument("--pairs-per-step", type=int, default=8)
    parser.add_argument("--max-length", type=int, default=1024)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="contestants, by the start of their names")
    parser.add_argument("--results", type=Path, help="JSON file for the seconds of every batch")
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    disable_progress_bars()
    for key in args.columns:
        column = COLUMNS[key]
        field = Field(column, args.data, args.batches, args.pairs_per_step, args.max_length)
        steps = {
            name: build()
            for name, build in field.contestants().items()
            if args.only is None or any(name.startswith(wanted) for wanted in args.only)
        }
        first = {name: step(0) for name, step in steps.items()}
        check_losses(first, FP32_TOLERANCE if column.dtype == torch.float32 else 2e-3)
        seconds = measure(steps, args.batches)
        if "thresher" in seconds:
            # a precomputed reference costs time once, in the first epoch; TRL's default pays it in every step
            in_advance = reference_seconds(column, field.pairs, field.plan)
            seconds["thresher, first epoch (reference included)"] = seconds["thresher"] + in_advance
        shares, ceiling = useful_share(field, seconds, args.batches)
        report_rows(field, args.batches)
        title = f"{column.name}, {args.data}, {args.batches} batches of {args.pairs_per_step} pairs"
        report(title, seconds, shares)
        if args.results is not None:
            keep(args.results, title, seconds, shares, ceiling)


if __name__ == "__main__":
    main()
