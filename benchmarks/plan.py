"""Measure the plan at full size: start-up, memory and time per step of 100 million pairs on 1,024 ranks of 128 pairs.

python benchmarks/plan.py [--pairs 100000000] [--ranks 1024] [--responses 7] [--kto]

With --responses above 2, the examples are lists of 2 up to that many responses. --kto: single responses, each next to
the answer of another example of its step. Seconds are of the CPU, so a busy machine changes little.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
from resident import kilobytes

from thresher.data.batching.batches import CostModel, MicroBatching
from thresher.data.batching.mismatched import MismatchedAnswers, VisitPlan
from thresher.data.batching.plan import PairIds, Plan
from thresher.data.store.reader import HASH_BYTES, HASH_DTYPE, LENGTH_DTYPE, Hashes, Lengths

PAIRS_PER_RANK = 128


def write_lengths(path: Path, num_pairs: int, num_responses: int) -> None:
    """Write lengths like those of real pairs: log-normal, prompts about twice as long as responses."""
    lengths = np.lib.format.open_memmap(path, mode="w+", dtype=LENGTH_DTYPE, shape=(num_pairs, 1 + num_responses))
    draw = np.random.default_rng(0)
    for start in range(0, num_pairs, 1_000_000):
        rows = min(1_000_000, num_pairs - start)
        sides = [draw.lognormal(mean, 0.8, rows).clip(1, 2000) for mean in (4.7, *[3.9] * num_responses)]
        if num_responses > 2:
            counts = draw.integers(2, num_responses + 1, rows)
            sides[1:] = [side * (number < counts) for number, side in enumerate(sides[1:])]
        lengths[start : start + rows] = np.stack(sides, axis=1)
    lengths.flush()


class Labels:
    """The part of ExampleStore that mismatched answers need."""

    def __init__(self, lengths: Lengths, prompts: Path, longest_example: int) -> None:
        self.lengths, self.longest_example = lengths, longest_example
        self._hashes = np.memmap(prompts, HASH_DTYPE, "r")

    def prompt_hashes(self, ids: PairIds) -> Hashes:
        return np.take(self._hashes, ids)


def write_hashes(path: Path, num_pairs: int) -> None:
    """Write random hashes of prompts."""
    draw = np.random.default_rng(1)
    with path.open("wb") as file:
        for start in range(0, num_pairs, 1_000_000):
            file.write(draw.bytes(HASH_BYTES * min(1_000_000, num_pairs - start)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=100_000_000)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--responses", type=int, default=2)
    parser.add_argument("--kto", action="store_true")
    parser.add_argument("--steps", type=int, default=50)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "lengths.npy"
        write_lengths(path, args.pairs, 1 if args.kto else args.responses)
        if args.kto:
            write_hashes(path.with_name("prompts.bin"), args.pairs)
        before = kilobytes("RssAnon") / 1024
        started = time.process_time()
        plan = Plan(args.pairs, seed=0, pairs_per_step=args.ranks * PAIRS_PER_RANK, num_steps=args.steps + 1)
        lengths = np.load(path, mmap_mode="r")
        if args.kto:
            plan = VisitPlan(**vars(plan))
            store = Labels(lengths, path.with_name("prompts.bin"), 4000)
            lengths = MismatchedAnswers(store, plan).lengths
        micro_batching = MicroBatching(lengths, CostModel(1 / (6 * 4096), shares_prompt=True), max_tokens=4096)
        micro_batching.split(plan.pair_ids(0), 0, args.ranks)
        start_up = time.process_time() - started
        seconds = []
        for step in range(1, args.steps + 1):
            started = time.process_time()
            micro_batching.split(plan.pair_ids(step), step % args.ranks, args.ranks)
            seconds.append(time.process_time() - started)
        low, middle, high = np.percentile(seconds, [25, 50, 75]) * 1e3
        private, mapped = kilobytes("RssAnon") / 1024 - before, kilobytes("RssFile") / 1024
        print(f"{args.pairs:,} pairs, {args.ranks} ranks, {plan.pairs_per_step:,} pairs per step")
        print(f"start-up including the first step: {start_up:.2f} s")
        print(f"per step, for one rank: {middle:.1f} ms (quartiles {low:.1f}-{high:.1f})")
        print(f"memory: {private:.0f} MB private, {mapped:.0f} MB memory-mapped")


if __name__ == "__main__":
    main()
