"""Measure the overhead of Ray: one Ray worker against one process on the same steps, and driver time per step.

    python benchmarks/ray_overhead.py [--parts pipeline driver] [--rounds 24] [--ranks 1 8 32 64]

pipeline: the same config in one process without Ray, and on one Ray worker, one thread each. They take turns on ranges
of the same steps, and log every step. The ratio is taken per range.
driver: workers without a model return one record per step and compute nothing, so that only the time of the driver and
of the transport remains. Stores of 10,000 and of 100 million pairs take turns.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np

PAIRS_PER_STEP = 4
STEPS_PER_RANGE = (50, 200)
NUM_PAIRS = (10_000, 100_000_000)
PAIRS_PER_SHARD = 524_288
# as many metrics as a trainer logs per step, with names of the same length
RECORD = {f"rewards/number/{number:02d}": number / 7 for number in range(28)}

Timed = tuple[float, float]  # seconds, and CPU seconds of this process
TimeRange = Callable[[int], Timed]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=["pipeline", "driver"], choices=["pipeline", "driver"])
    parser.add_argument("--rounds", type=int, default=24, help="number of ranges that each side trains")
    parser.add_argument("--steps", type=int, default=8, help="steps per range")
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=[1, 8, 32, 64], help="numbers of workers without a model"
    )
    parser.add_argument("--repeats", type=int, default=12, help="number of ranges of each kind to time the driver on")
    args = parser.parse_args()
    from thresher.runtime.ray.environment import set_environment

    set_environment(None)  # before anything imports Ray
    if "pipeline" in args.parts:
        compare_pipelines(args.rounds, args.steps)
    if "driver" in args.parts:
        time_driver(args.ranks, args.repeats)


# --- one process against one Ray worker ---


def compare_pipelines(num_rounds: int, num_steps: int) -> None:
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        directory = Path(name)
        values = write_run(directory, num_steps * (num_rounds + 1))
        sides = {
            "in process": stack.enter_context(in_a_process_without_ray(values, directory / "local")),
            "one Ray worker": stack.enter_context(on_one_ray_worker(values, directory / "ray")),
        }
        rounds: dict[str, list[Timed]] = {name: [] for name in sides}
        for at in range(num_rounds + 1):
            names = list(sides) if at % 2 else list(reversed(sides))
            for name in names:
                rounds[name].append(sides[name]((at + 1) * num_steps))
        check_same_losses(directory / "local", directory / "ray")
    report_pipelines({name: np.array(own[1:]) for name, own in rounds.items()}, num_steps)


def write_run(directory: Path, num_steps: int) -> dict[str, Any]:
    """Write a Llama with random weights, a BPE of its size and real pairs, and return the config of a run."""
    import torch
    from contestants import Column
    from pairs import DATA, train_bpe
    from transformers import PreTrainedTokenizerFast

    texts = DATA["hh"]()
    column = Column("h256 L4 V8k fp32", 256, 4, 8_000, torch.float32)
    model = directory / "model"
    column.model().save_pretrained(model)
    PreTrainedTokenizerFast(
        tokenizer_object=train_bpe(texts, column.vocab), pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    ).save_pretrained(model)
    wanted = texts[: num_steps * PAIRS_PER_STEP]
    rows = [{"prompt": prompt, "chosen": chosen, "rejected": rejected} for prompt, chosen, rejected in wanted]
    data = directory / "train.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "pretrain": str(model),
        "cache_dir": str(directory / "cache"),
        "max_steps": num_steps,
        "sequence_length": 1024,
        "track_with": ["jsonl"],
        "actor_train": {
            "model_args": {"dtype": "fp32"},
            "data_args": {"file_name": str(data), "template": "raw"},
            "training_args": {"learning_rate": 1e-6, "per_device_train_batch_size": PAIRS_PER_STEP},
        },
    }


@contextmanager
def begun(values: dict[str, Any], output: Path) -> Iterator[TimeRange]:
    """Start a run of the pipeline's components before its first step; yield a function that trains up to a step."""
    from thresher.builders.inputs import RunInputs
    from thresher.builders.run import build_tracking, track
    from thresher.config import parse_config
    from thresher.observability.timing import PhaseClock
    from thresher.runtime.open import open_runtime

    config = parse_config({**values, "output_dir": str(output)})
    trackers = build_tracking(config, None)
    inputs = RunInputs(config)
    with open_runtime(inputs, PhaseClock()) as runtime:
        started = runtime.start(inputs, None, lambda what, done, total: None)
        started.begin()
        with track(trackers, started.inputs, resume_step=None):
            yield lambda until: time_range(started, until, trackers)


def time_range(trainable: Any, until: int, log: Any) -> Timed:
    """Train and log up to a step, as `fit` does between two evaluations."""
    seconds, cpu_seconds = time.perf_counter(), time.process_time()
    for at, metrics in trainable.run(until):
        log.log(at, metrics)
    return time.perf_counter() - seconds, time.process_time() - cpu_seconds


@contextmanager
def in_a_process_without_ray(values: dict[str, Any], output: Path) -> Iterator[TimeRange]:
    """Run the trainer in a separate process, so that Ray's threads in this one do not affect it."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=serve_ranges, args=(values, output, there), daemon=True)
    process.start()
    assert here.recv() == "ready"

    def run(until: int) -> Timed:
        here.send(until)
        timed: Timed = here.recv()
        return timed

    yield run
    here.send(None)
    process.join()


def serve_ranges(values: dict[str, Any], output: Path, connection: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    with begun({**values, "runtime": "local"}, output) as run:
        connection.send("ready")
        while (until := connection.recv()) is not None:
            connection.send(run(until))


@contextmanager
def on_one_ray_worker(values: dict[str, Any], output: Path) -> Iterator[TimeRange]:
    # the number of threads of a worker follows from the cores that Ray has
    with ray_with_cores(1), begun({**values, "runtime": "ray"}, output) as run:
        yield run


@contextmanager
def ray_with_cores(num_cpus: int | None) -> Iterator[None]:
    import ray

    ray.init(address="local", num_cpus=num_cpus, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


def check_same_losses(one: Path, other: Path) -> None:
    """Require that both sides made the same steps."""
    logs = [(output / "logs" / "metrics.jsonl").read_text().splitlines() for output in (one, other)]
    losses = [[json.loads(line)["loss"] for line in lines] for lines in logs]
    np.testing.assert_allclose(losses[0], losses[1], atol=1e-5)


def report_pipelines(rounds: dict[str, np.ndarray], num_steps: int) -> None:
    print(f"\n{len(rounds['in process'])} ranges of {num_steps} steps of {PAIRS_PER_STEP} pairs, in turn\n")
    print("| | pairs/s: median (quartiles) | ms/step | CPU ms/step of the process that logs |\n|---|---|---|---|")
    for name, own in rounds.items():
        speed = spread(PAIRS_PER_STEP * num_steps / own[:, 0], "{:.2f}")
        print(f"| {name} | {speed} | {np.median(own[:, 0]) / num_steps * 1e3:.1f} ", end="")
        print(f"| {np.median(own[:, 1]) / num_steps * 1e3:.2f} |")
    ratios = rounds["in process"][:, 0] / rounds["one Ray worker"][:, 0]
    print(f"\none Ray worker over one process, pairs/s range by range: {spread(ratios, '{:.3f}')}")
    print(f"lowest {ratios.min():.3f}, highest {ratios.max():.3f}")


# --- the driver ---


class LightWorker:
    """A policy rank without a model: the calls and records of an ActorWorker, without the work."""

    def __init__(self, rank: int, size: int, threads: int, directory: str):  # noqa: ARG002
        self._step = 0

    def run(self, until: int) -> Iterator[tuple[int, dict[str, float]]]:
        while self._step < until:
            self._step += 1
            yield self._step, dict(RECORD)

    def drain(self, method: str, until: int) -> None:  # noqa: ARG002
        self._step = until


class Discarding:
    def log(self, step: int, metrics: dict[str, float]) -> None:
        pass


def time_driver(ranks: Sequence[int], repeats: int) -> None:
    from thresher.config.roles import PolicyConfig
    from thresher.runtime.group import Runtime
    from thresher.runtime.ray.cluster import Cluster, ResourceManager

    report_messages()
    with ray_with_cores(None):
        report_waiting()
        print(f"\ndriver ms per step, {repeats} ranges of each kind in turn: median (quartiles)\n")
        print("| workers | steps per range | pairs in the store | wall | CPU |\n|---:|---:|---:|---|---|")
        for size in ranks:
            resources = ResourceManager({"actor_train": PolicyConfig(num_workers=size)}, None, concurrent=True)
            cluster = Cluster("actor_train", LightWorker, resources)
            cluster.call("drain", "run", 0)  # wait for all workers
            report_driver(size, time_ranges(Runtime(None, cluster), repeats))
            report_empty_call(size, [time_empty_call(cluster) for _ in range(repeats)])
            cluster.close()
            resources.close()


def time_ranges(trainable: Any, repeats: int) -> dict[tuple[int, int], np.ndarray]:
    """Measure milliseconds per step, by steps per range and pairs in the store."""
    from thresher.data.batching.plan import Plan

    timed: dict[tuple[int, int], list[Timed]] = {(steps, pairs): [] for steps in STEPS_PER_RANGE for pairs in NUM_PAIRS}
    done = 0
    time_range(trainable, done := done + 10, Discarding())
    for _ in range(repeats):
        for steps, num_pairs in timed:
            plan = Plan(num_pairs, seed=0, pairs_per_step=1024, num_steps=done + steps)
            seconds, cpu_seconds = time_range(trainable, done := plan.num_steps, Discarding())
            timed[steps, num_pairs].append((seconds / steps * 1e3, cpu_seconds / steps * 1e3))
    return {kind: np.array(own) for kind, own in timed.items()}


def report_driver(size: int, timed: dict[tuple[int, int], np.ndarray]) -> None:
    for (steps, num_pairs), own in timed.items():
        wall, cpu = spread(own[:, 0], "{:.2f}"), spread(own[:, 1], "{:.2f}")
        print(f"| {size} | {steps} | {num_pairs:,} | {wall} | {cpu} |", flush=True)


def time_empty_call(cluster: Any) -> Timed:
    """Call an empty method of all workers: the cost of a range without steps."""
    import ray

    seconds, cpu_seconds = time.perf_counter(), time.process_time()
    ray.get([worker.drain.remote("run", 0) for worker in cluster.workers])
    return time.perf_counter() - seconds, time.process_time() - cpu_seconds


def report_empty_call(size: int, timed: Sequence[Timed]) -> None:
    wall, cpu = (spread(1e3 * own, "{:.1f}") for own in np.array(timed).T)
    print(f"| {size} | an empty call to all workers, total ms | | {wall} | {cpu} |", flush=True)


def report_waiting(seconds: float = 10.0) -> None:
    """Print the CPU time of an idle driver, which is that of Ray's threads."""
    cpu_seconds = time.process_time()
    time.sleep(seconds)
    print(f"an idle driver: {(time.process_time() - cpu_seconds) / seconds * 1e3:.1f} ms of CPU per second")


def report_messages() -> None:
    """Print the bytes sent to a worker: once, when it loads, and per range."""
    from ray import cloudpickle

    for num_pairs in NUM_PAIRS:
        with tempfile.TemporaryDirectory() as name:
            inputs = inputs_of(num_pairs, Path(name))
            once, each = (len(cloudpickle.dumps(what)) for what in (inputs, (inputs.plan.num_steps,)))
        print(f"{num_pairs:,} pairs: {once:,} bytes of inputs per worker, once; {each} bytes per range of steps")


def inputs_of(num_pairs: int, directory: Path) -> Any:
    """Build the inputs of a run over a store with a manifest and lengths, but without pairs; none are read."""
    from thresher.builders.inputs import RunInputs
    from thresher.config import DPOConfig
    from thresher.data.batching.plan import Plan
    from thresher.data.store.reader import LENGTH_DTYPE, ExampleStore
    from thresher.losses import Objective, make_loss
    from thresher.models.layouts import PackedLayout

    with (directory / "lengths.bin").open("wb") as lengths:
        lengths.truncate(num_pairs * 3 * np.dtype(LENGTH_DTYPE).itemsize)
    shards = [
        {"name": f"{start}.arrow", "size": 1 << 30, "sha256": secrets.token_hex(32), "num_pairs": num_in_shard}
        for start in range(0, num_pairs, PAIRS_PER_SHARD)
        if (num_in_shard := min(PAIRS_PER_SHARD, num_pairs - start))
    ]
    digests = dict.fromkeys(("content_digest", "identity"), "0" * 64)
    manifest = {"shards": shards, "indexes": [], **digests, "longest_pair": 1024, "columns_in_use": []}
    store = ExampleStore(directory, manifest)
    plan = Plan(num_pairs, seed=0, pairs_per_step=1024, num_steps=1000)
    objective = Objective(terms=((make_loss("sigmoid", {}), 1.0),))
    parts = {"objective": objective, "mode": "none", "frozen_weights": None, "plan": plan, "train": store}
    return RunInputs(DPOConfig()).replace(**parts, layout=PackedLayout(shares_prompt=True), validation=None)


def spread(values: np.ndarray, form: str) -> str:
    low, middle, high = (form.format(value) for value in np.percentile(values, [25, 50, 75]))
    return f"{middle} ({low}-{high})"


if __name__ == "__main__":
    main()
