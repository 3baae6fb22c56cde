"""Measure what planning costs as ranks and pairs grow: the split of a step, and a store with a held-out split.

PYTHONPATH=. python benchmarks/growth_planning.py ranks [--pairs 100000000] [--all-ranks]
PYTHONPATH=. python benchmarks/growth_planning.py store [--pairs 1000000 10000000 100000000] [--share 0.01]
PYTHONPATH=. python benchmarks/growth_planning.py thread

`ranks`: CPU milliseconds per rank and step to find the pairs of the step, read their lengths from a memory map, assign
them to ranks, bin one's own and count the micro-batches of all. --all-ranks bins those of all ranks instead, as earlier
versions did. `store`: seconds and memory of a process that opens a synthetic store and both sides of its split, the
first time and again. Its shards repeat every 10 million pairs, and its file of lengths is sparse, so that any size
takes 1 GB of disk. `thread`: blocks of steps of a tiny model that read the next step in a thread
take turns with blocks that do not; cached reference, one process.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
from plan import write_lengths
from resident import kilobytes

from tests.support.tiny_llama import VOCAB, save_tiny_llama
from tests.support.tiny_run import build_run
from thresher.data.batching.batches import CostModel, MicroBatching
from thresher.data.batching.plan import Plan
from thresher.data.example import Example
from thresher.data.store.arrow_schema import hash_example, pairs_to_record_batch
from thresher.data.store.reader import FORMAT_VERSION, LENGTH_DTYPE, ROWS_PER_RECORD_BATCH, SCHEMA, ExampleStore
from thresher.data.store.writer import StoreWriter

RANKS = ((128, 64), (1024, 4), (2048, 4), (16384, 4))  # and pairs per rank
BUDGETS = (4096, 600)  # tokens of a micro-batch; with the smaller one, a rank has 3 to 30 micro-batches
PAIRS_PER_SHARD, DISTINCT_SHARDS = 500 * ROWS_PER_RECORD_BATCH, 20


def measure_ranks(num_pairs: int, steps: int, *, all_ranks: bool) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "lengths.npy"
        write_lengths(path, num_pairs, 2)
        lengths = np.load(path, mmap_mode="r")
        costs = CostModel(1 / (6 * 4096), shares_prompt=True)
        for num_ranks, pairs_per_rank in RANKS:
            plan = Plan(num_pairs, seed=0, pairs_per_step=num_ranks * pairs_per_rank, num_steps=2 * steps)
            for budget in BUDGETS:
                batching, seconds = MicroBatching(lengths, costs, max_tokens=budget), []
                for step in range(2 * steps):
                    started = time.process_time()
                    ids = plan.pair_ids(step)
                    if all_ranks:
                        most = max(map(len, batching.split_ranks(ids, range(num_ranks), num_ranks)))
                    else:
                        most = len(batching.split_in_lockstep(ids, step % num_ranks, num_ranks))
                    seconds.append(time.process_time() - started)
                low, middle, high = np.percentile(seconds[steps:], [25, 50, 75]) * 1e3  # pages of the map are resident
                print(
                    f"{num_ranks:,} ranks x {pairs_per_rank} pairs, {budget} tokens, {most} micro-batches: "
                    f"{middle:.1f} ms (quartiles {low:.1f}-{high:.1f})",
                    flush=True,
                )


def write_store(path: Path, num_pairs: int) -> None:
    """Write a store of pairs of six tokens with random hashes."""
    (path / "shards").mkdir(parents=True)
    draw, rows = np.random.default_rng(0), ROWS_PER_RECORD_BATCH
    shards = [path / "shards" / f"{number:05d}.arrow" for number in range(DISTINCT_SHARDS)]
    tokens = pa.ListArray.from_arrays(np.arange(0, 2 * rows + 1, 2, dtype=np.int32), np.zeros(2 * rows, np.int32))
    ones = pa.array(np.ones(rows, np.float32))
    for shard in shards[: -(-num_pairs // PAIRS_PER_SHARD)]:
        with pa.ipc.new_file(str(shard), SCHEMA) as writer:
            for _ in range(PAIRS_PER_SHARD // rows):
                hashes = [pa.Array.from_buffers(pa.binary(16), rows, [None, pa.py_buffer(draw.bytes(16 * rows))])] * 2
                lists = [tokens.cast(field.type) for field in list(SCHEMA)[:3]]
                masks = [pa.nulls(rows, field.type) for field in list(SCHEMA)[3:5]]
                writer.write_batch(pa.RecordBatch.from_arrays([*lists, *masks, ones, ones, *hashes], schema=SCHEMA))
    with (path / "lengths.bin").open("wb") as stream:
        stream.truncate(num_pairs * 3 * LENGTH_DTYPE.itemsize)
    num_shards = num_pairs // PAIRS_PER_SHARD
    names = [shards[number % DISTINCT_SHARDS] for number in range(num_shards)]
    entries = [
        {"name": f"shards/{each.name}", "size": each.stat().st_size, "sha256": "", "num_pairs": PAIRS_PER_SHARD}
        for each in names
    ]
    index = {"name": "lengths.bin", "size": (path / "lengths.bin").stat().st_size, "sha256": "", "num_pairs": 0}
    manifest = {"format_version": FORMAT_VERSION, "shards": entries, "indexes": [index], "longest_pair": 4}
    manifest |= {"content_digest": str(num_pairs), "identity": "", "columns_in_use": []}
    (path / "manifest.json").write_text(json.dumps(manifest))


def open_store(path: Path, share: float) -> None:
    """Open a store and its split, in a process of its own."""
    before, started = kilobytes("RssAnon"), time.perf_counter()
    train, held_out = ExampleStore.open(path).split(share, 0, path / "splits")
    seconds, private = time.perf_counter() - started, (kilobytes("RssAnon") - before) / 1024
    draw = np.random.default_rng(0)
    started = time.perf_counter()
    train.lengths.take(draw.integers(0, len(train), 65_536))
    of_step = (time.perf_counter() - started) * 1e3
    started = time.perf_counter()
    train.read(draw.integers(0, len(train), 1000))
    of_pair = time.perf_counter() - started
    print(
        f"{len(train):,} + {len(held_out):,}: {seconds:.2f} s, {private:.0f} MB private; lengths of 65,536 pairs "
        f"{of_step:.0f} ms, tokens of a pair {of_pair:.2f} ms"
    )


def compare_blocks(steps: int, pairs_per_step: int = 64, rounds: int = 12) -> None:
    draw = np.random.default_rng(0)
    rows = [[draw.integers(4, VOCAB, size).astype(np.int32) for size in (120, 60, 60)] for _ in range(2000)]
    pairs = [Example.pair(*row) for row in rows]
    waits, seconds = dict[bool, list[float]](), dict[bool, list[float]]()
    with tempfile.TemporaryDirectory() as directory:
        with StoreWriter(Path(directory) / "store", 1 << 16) as writer:
            writer.append(pairs_to_record_batch(pairs, [hash_example(pair) for pair in pairs]))
            writer.finish({"identity": "steps"})
        model, num_steps = save_tiny_llama(Path(directory) / "model", 0), steps * rounds
        values = {
            "pretrain": str(model),
            "max_steps": num_steps,
            "num_train_epochs": 1000,
            "reference": {"mode": "precompute", "cache_dir": f"{directory}/cache"},
            "actor_train": {
                "model_args": {"dtype": "fp32"},
                "training_args": {"per_device_train_batch_size": pairs_per_step, "max_tokens_per_micro_batch": 4096},
            },
        }
        trainers = {}
        for in_thread in (True, False):
            store = ExampleStore.open(Path(directory) / "store")
            trainers[in_thread] = build_run(values | {"output_dir": f"{directory}/{in_thread}"}, store).trainer
        trainers[False]._ahead.start = lambda step: None  # type: ignore[method-assign]
        for number in range(1, rounds + 1):
            for in_thread in (True, False) if number % 2 else (False, True):
                records = [metrics for _, metrics in trainers[in_thread].run(number * steps)]
                for found, name in ((seconds, "time/step"), (waits, "time/wait_reference")):
                    found.setdefault(in_thread, []).append(float(np.median([each[name] for each in records])))
    ratio = np.median(np.array(seconds[True][1:]) / np.array(seconds[False][1:]))
    for name, each in (("step", seconds), ("wait for pairs and cached logps", waits)):
        print(f"{name}: {np.median(each[False]) * 1e3:.2f} ms, with the thread {np.median(each[True]) * 1e3:.2f} ms")
    print(f"step with the thread / without, median of {rounds - 1} turns: {ratio:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["ranks", "store", "thread", "open"])
    parser.add_argument("--pairs", type=int, nargs="+")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--all-ranks", action="store_true")
    parser.add_argument("--share", type=float, default=0.01)
    parser.add_argument("--path", type=Path)
    args = parser.parse_args()
    if args.what == "ranks":
        measure_ranks((args.pairs or [100_000_000])[0], args.steps, all_ranks=args.all_ranks)
    elif args.what == "thread":
        compare_blocks(args.steps)
    elif args.what == "open":
        open_store(args.path, args.share)
    else:
        for num_pairs in args.pairs or (1_000_000, 10_000_000, 100_000_000):
            with tempfile.TemporaryDirectory() as directory:
                path = Path(directory) / "store"
                write_store(path, -(-num_pairs // PAIRS_PER_SHARD) * PAIRS_PER_SHARD)
                command = [sys.executable, __file__, "open", "--path", str(path), "--share", str(args.share)]
                for _ in range(2):
                    subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
