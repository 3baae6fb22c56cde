"""Measure how much of a save overlaps with training: blocks of steps without, with a synchronous, a background save.

python benchmarks/async_save.py                  # the table of docs/internals/benchmarks.md
The three kinds of block take turns, so that a host that slows down slows all of them. One thread trains; the writing
thread uses the other core.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from contestants import LEARNING_RATE, Column, write_store

from thresher.checkpoint.manager import CheckpointManager
from thresher.checkpoint.save import Write
from thresher.config import DPOConfig
from thresher.config.roles import TrainingArgs
from thresher.data.batching.batches import CostModel, MicroBatching, ScoringBatching
from thresher.data.batching.plan import Plan
from thresher.data.example import Example
from thresher.distributed.run_on_all import Communicator
from thresher.engines.native.build import train_engine
from thresher.losses import Objective, make_loss
from thresher.models.layouts import PackedLayout
from thresher.reference.scorers import Reference
from thresher.training.lr_schedule import LRSchedule
from thresher.training.trainer import RankTrainer

MODEL = Column("h512 L8 V8k", 512, 8, 8000, torch.float32)
PAIRS_PER_STEP, TOKENS_OF_A_SIDE = 4, 64
KINDS = ("no save", "synchronous save", "background save (`async_save`)")


@dataclass(frozen=True)
class TimedKeeper(CheckpointManager):
    """Record when each save was published."""

    published_at: list[float] = field(default_factory=list)

    def save(self, step: int, write: Write, metrics: Mapping[str, float], processes: Communicator) -> Path:
        place = super().save(step, write, metrics, processes)
        self.published_at.append(time.perf_counter())
        return place


@dataclass
class Timing:
    """Seconds per block: the whole block, the time that saving blocked training, and until the save was published."""

    block: list[float] = field(default_factory=list)
    call: list[float] = field(default_factory=list)
    save: list[float] = field(default_factory=list)


def made_up_pairs(count: int) -> list[Example]:
    draw = np.random.default_rng(0)
    return [
        Example.pair(*(draw.integers(3, MODEL.vocab, TOKENS_OF_A_SIDE).astype(np.int32) for _ in range(3)))
        for _ in range(count)
    ]


def make_trainer(num_steps: int, directory: Path, *, async_save: bool) -> tuple[RankTrainer, TimedKeeper]:
    store = write_store(made_up_pairs(PAIRS_PER_STEP * 4), directory / "pairs")
    plan = Plan(len(store), seed=0, pairs_per_step=PAIRS_PER_STEP, num_steps=num_steps)
    keeper = TimedKeeper(directory / "checkpoints", 1, "eval/loss", False)
    policy = train_engine(
        MODEL.model(), PackedLayout(shares_prompt=True), MODEL.dtype, TrainingArgs(learning_rate=LEARNING_RATE)
    )
    micro_batching = MicroBatching(store.lengths, CostModel(1 / (6 * MODEL.hidden), shares_prompt=True), 4096)
    trainer = RankTrainer(
        DPOConfig(output_dir=str(directory), async_save=async_save),
        policy,
        Objective(terms=((make_loss("simpo", {}), 1.0),)),
        plan,
        train=store,
        validation=None,
        reference=Reference(),
        micro_batching=micro_batching,
        eval_batching=ScoringBatching(max_tokens=4096, max_pairs=8),
        schedule=LRSchedule("constant", LEARNING_RATE, 0, num_steps),
        checkpoints=keeper,
        identity={},
    )
    return trainer, keeper


def time_block(trainer: RankTrainer, keeper: TimedKeeper, steps: int, timing: Timing, *, saves: bool) -> None:
    """Save, make some steps, and wait for a pending save, as the next save would."""
    started = time.perf_counter()
    if saves:
        trainer.save()
        timing.call.append(time.perf_counter() - started)
    for _ in range(steps):
        trainer.training_step()
    waited_from = time.perf_counter()
    trainer.wait_for_saves()
    timing.block.append(time.perf_counter() - started)
    if saves:
        timing.call[-1] += time.perf_counter() - waited_from
        timing.save.append(keeper.published_at[-1] - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--saves", type=int, default=7, help="number of saves of each kind")
    parser.add_argument("--steps", type=int, default=4, help="steps between two saves")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        num_steps = 2 * (args.saves + 1) * args.steps + 1
        at_once = make_trainer(num_steps, Path(directory, "at once"), async_save=False)
        behind = make_trainer(num_steps, Path(directory, "behind"), async_save=True)
        timings = {kind: Timing() for kind in KINDS}
        for _ in range(args.saves + 1):
            time_block(*at_once, args.steps, timings[KINDS[0]], saves=False)
            time_block(*at_once, args.steps, timings[KINDS[1]], saves=True)
            time_block(*behind, args.steps, timings[KINDS[2]], saves=True)
        (newest,) = Path(directory, "behind", "checkpoints").glob("step-*")
        megabytes = sum(path.stat().st_size for path in newest.iterdir()) / 1e6
    report(timings, megabytes)


def report(timings: dict[str, Timing], megabytes: float) -> None:
    """Print medians without the first round, which allocates memory and optimizer state."""

    def middle(seconds: list[float]) -> float:
        return float(np.median(seconds[1:]))

    none, at_once, behind = (timings[kind] for kind in KINDS)
    print(f"\n{MODEL.name} fp32, checkpoints of {megabytes:,.0f} MB, {len(none.block) - 1} saves\n")
    print("| | training waits, s | until published, s | whole block of steps, s |\n|---|---:|---:|---:|")
    print(f"| {KINDS[0]} | | | {middle(none.block):.2f} |")
    for kind in KINDS[1:]:
        timing = timings[kind]
        print(f"| {kind} | {middle(timing.call):.2f} | {middle(timing.save):.2f} | {middle(timing.block):.2f} |")
    of_itself = [1 - call / save for call, save in zip(behind.call, behind.save, strict=True)]
    of_blocks = 1 - (middle(behind.block) - middle(none.block)) / (middle(at_once.block) - middle(none.block))
    of_a_save = 1 - middle(behind.call) / middle(at_once.call)
    print(f"\na background save hides {middle(of_itself):.0%} of its duration, {of_a_save:.0%} of the time that a")
    print(f"synchronous save blocks training, and {of_blocks:.0%} of what saves add to a block of steps")


if __name__ == "__main__":
    main()
