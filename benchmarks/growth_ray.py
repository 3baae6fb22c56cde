"""Measure how the start of workers on Ray, and calls that go to all of them, grow with their number.

    python benchmarks/growth_ray.py [--workers 8 16 32 64] [--bundles 64 256 1024] [--real]

Workers are light, an actor without a model, so that the time is that of Ray and the driver; --real starts policy
workers, which import torch and transformers. `Ray calls` counts what the driver asks of Ray from the start to the end
of the second call, and `refs` what it passes to them. The second call carries as many bytes as the inputs of a run over
100 million pairs. Bundles are reserved on a node that claims as many cores.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from ray_overhead import inputs_of, ray_with_cores

NUM_PAIRS = 100_000_000


class LightWorker:
    """A worker without a model."""

    def __init__(self, rank: int, size: int, threads: int, directory: str):  # noqa: ARG002
        self._rank = rank

    def ready(self) -> int:
        return self._rank

    def take(self, inputs: object) -> int:  # noqa: ARG002
        return self._rank


class CountedCalls:
    """Counts the calls of functions of Ray, and the refs that they get."""

    def __init__(self) -> None:
        import ray

        self.calls, self.refs = Counter[str](), Counter[str]()
        for name in ("wait", "get", "put"):
            setattr(ray, name, self._counting(name, getattr(ray, name)))

    def _counting(self, name: str, function: Any) -> Any:
        def call(given: Any, *arguments: Any, **more: Any) -> Any:
            self.calls[name] += 1
            self.refs[name] += len(given) if isinstance(given, Sequence) else 1
            return function(given, *arguments, **more)

        return call


def measure(sizes: Sequence[int], inputs: bytes, *, real: bool) -> None:
    from thresher.config.roles import PolicyConfig
    from thresher.runtime.ray.cluster import Cluster, ResourceManager

    counted, seconds = CountedCalls(), []
    print("| workers | start: s | call with inputs: ms | Ray calls | refs |\n|---:|---:|---:|---|---|")
    for size in sizes:
        resources = ResourceManager({"actor_train": PolicyConfig(num_workers=size)}, None, concurrent=True)
        counted.calls.clear()
        counted.refs.clear()
        started = time.perf_counter()
        if real:
            from thresher.runtime.ray.workers import ActorWorker

            cluster = Cluster("actor_train", ActorWorker, resources)
            cluster.call("claim_device", "actor_train", Path(tempfile.gettempdir()), False)
        else:
            cluster = Cluster("actor_train", LightWorker, resources)
            assert cluster.call("ready") == list(range(size))
        seconds.append(time.perf_counter() - started)
        called = time.perf_counter()
        if not real:
            cluster.call("take", inputs)
        milliseconds = (time.perf_counter() - called) * 1e3
        calls, refs = (
            ", ".join(f"{name} {count:,}" for name, count in each.items()) for each in vars(counted).values()
        )
        print(f"| {size} | {seconds[-1]:.1f} | {milliseconds:.0f} | {calls} | {refs} |", flush=True)
        cluster.close()
        resources.close()
    if len(sizes) > 1:
        print(f"slope of the start: {np.polyfit(sizes, seconds, 1)[0]:.2f} s per worker")


def reserve(numbers: Sequence[int]) -> None:
    from thresher.config.roles import PolicyConfig
    from thresher.runtime.ray.cluster import ResourceManager

    print("\n| bundles | reserved in s |\n|---:|---:|")
    for number in numbers:
        started = time.perf_counter()
        resources = ResourceManager({"actor_train": PolicyConfig(num_workers=number)}, None, concurrent=True)
        print(f"| {number:,} | {time.perf_counter() - started:.2f} |", flush=True)
        resources.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="*", default=[8, 16, 32, 64])
    parser.add_argument("--bundles", type=int, nargs="*", default=[64, 256, 1024])
    parser.add_argument("--real", action="store_true", help="start policy workers")
    args = parser.parse_args()
    from thresher.runtime.ray.environment import set_environment

    set_environment(None)  # before anything imports Ray
    from ray import cloudpickle

    with tempfile.TemporaryDirectory() as name:
        inputs = cloudpickle.dumps(inputs_of(NUM_PAIRS, Path(name)))
        with ray_with_cores(None):
            measure(args.workers, inputs, real=args.real)
    if args.bundles:
        with ray_with_cores(max(args.bundles)):
            reserve(args.bundles)


if __name__ == "__main__":
    main()
