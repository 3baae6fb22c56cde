"""Spare workers: they replace all workers after a failure, and end with the run."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.compared_runs import merge, metric_log
from tests.support.logged import logged
from tests.support.small_runs import assert_same_weights
from tests.support.worker_killer import workers_named
from thresher.config import parse_config
from thresher.pipeline import DPOPipeline

pytestmark = pytest.mark.distributed

TWO = {"runtime": "ray", "actor_train": {"num_workers": 2}, "track_with": ["console"], "async_save": False}
SECONDS_TO_START = 120.0


class Visitor:
    """A console that calls a function when a step is logged for the first time."""

    name = "console"

    def __init__(self, step: int, visit: Callable[[], object]):
        self._step, self._visit, self.has_visited = step, visit, False

    def start(self, run: object, resume_step: int | None) -> None:
        pass

    def log(self, step: int, metrics: object) -> None:  # noqa: ARG002
        if step == self._step and not self.has_visited:
            self.has_visited = True
            self._visit()

    def close(self, status: str) -> None:
        pass


def wait_until(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS_TO_START
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.fixture
def pools(monkeypatch) -> list[Any]:
    """Start spares at once; return the pools of all runs."""
    from thresher.runtime.ray import runtime, spares

    made: list[Any] = []

    class RememberedPool(spares.SparePool):
        def __init__(self, per_worker: int):
            super().__init__(per_worker)
            made.append(self)

    monkeypatch.setattr(spares, "_SECONDS_BEFORE_SPARES", 0.0)
    monkeypatch.setattr(runtime, "SparePool", RememberedPool)
    return made


def await_spares(pool: Any, count: int) -> None:
    def is_complete() -> bool:
        pool.maintain()
        return bool(pool.num_ready == count)

    wait_until(is_complete)


def run(values: dict[str, Any], output: Path, console: Any = None) -> list[str]:
    with logged() as records:
        DPOPipeline(parse_config({**values, "output_dir": str(output)}), console=console).run()
    return [record.getMessage() for record in records]


def recovery_of(output: Path) -> dict[str, Any]:
    (line,) = (output / "logs" / "recoveries.jsonl").read_text().splitlines()
    recovery: dict[str, Any] = json.loads(line)
    return recovery


@pytest.mark.hand  # CI has a recovery without spares, and a spare that takes a place
def test_spares_replace_all_workers_bitwise_and_none_is_left(base, ray_here, pools, tmp_path):
    values = merge(base, {**TWO, "spare_workers": 1})
    run({**values, "spare_workers": 0}, tmp_path / "uninterrupted")
    seen: dict[str, list[int]] = {}

    def kill_a_spare_and_a_worker() -> None:
        pool = pools[-1]
        workers = [rank.process.pid for rank in pool._ranks]
        await_spares(pool, 2)
        lost = next(pid for pid in workers_named("ActorWorker") if pid not in workers)
        os.kill(lost, signal.SIGKILL)
        wait_until(lambda: pool.maintain() or pool.num_ready < 2)
        await_spares(pool, 2)  # another one was started
        seen["spares"] = [pid for pid in workers_named("ActorWorker") if pid not in workers]
        assert lost not in seen["spares"]
        os.kill(workers[-1], signal.SIGKILL)

    lines = run(values, tmp_path / "killed", Visitor(3, kill_a_spare_and_a_worker))
    assert "2 of 2 actor_train workers are spares" in lines
    logs = [(tmp_path / "killed/logs/workers" / f"actor_train-{rank}.log").read_text() for rank in (0, 1)]
    assert all(any(f"process {pid} on" in log for log in logs) for pid in seen["spares"])
    assert metric_log(tmp_path / "killed") == metric_log(tmp_path / "uninterrupted")
    assert_same_weights(tmp_path / "killed", tmp_path / "uninterrupted")
    recovery = recovery_of(tmp_path / "killed")
    assert recovery["seconds"] == pytest.approx(sum(recovery["phases"].values()), abs=0.1)
    assert recovery["phases"]["import"] == 0.0
    wait_until(lambda: not workers_named("ActorWorker"))


def test_a_stopped_worker_is_ended_before_a_spare_takes_its_place(ray_here):
    """A process that Ray cannot ask to end would keep its memory on the GPU."""
    import subprocess

    import psutil
    import ray

    from thresher.runtime.ray.heartbeat_monitor import CONCURRENCY_GROUPS
    from thresher.runtime.ray.workers import ActorWorker

    stopped = subprocess.Popen(["/bin/sleep", "600"])
    stopped.send_signal(signal.SIGSTOP)
    remote = ray.remote(num_cpus=0, concurrency_groups=CONCURRENCY_GROUPS)(ActorWorker)
    spare = remote.remote(0, 1, 1, str(Path.cwd()))
    started = psutil.Process(stopped.pid).create_time()
    ray.get(spare.await_exit.remote([(stopped.pid, started - 1.0)]))  # another process had this pid
    assert stopped.poll() is None
    reaped = spare.await_exit.remote([(stopped.pid, started)])
    assert stopped.wait(timeout=60) == -signal.SIGKILL
    ray.get(reaped)
    ray.kill(spare)


def test_a_worker_that_is_still_starting_is_not_lost(ray_here):
    """The imports and the load of a worker may take longer than heartbeat_timeout."""
    import ray

    from thresher.runtime.ray.heartbeat_monitor import CONCURRENCY_GROUPS, HeartbeatMonitor
    from thresher.runtime.ray.workers import ActorWorker

    class SlowWorker(ActorWorker):
        def __init__(self, *arguments: object) -> None:
            time.sleep(4)
            super().__init__(*arguments)

    worker = ray.remote(num_cpus=0, concurrency_groups=CONCURRENCY_GROUPS)(SlowWorker).remote(0, 1, 1, str(Path.cwd()))
    monitor = HeartbeatMonitor(heartbeat_timeout=2.0)
    monitor.add("actor_train", [worker])
    started = worker.heartbeat.remote()
    assert monitor.wait_any([started]) == (started, [])
    ray.kill(worker)
