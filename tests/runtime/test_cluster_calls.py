"""Calls of all workers of a cluster: their cost for the driver, and the first failure."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from thresher.config.roles import PolicyConfig
from thresher.errors import ResourceError, WorkerError, WorkerLostError
from thresher.runtime.ray import fork_server

pytestmark = pytest.mark.distributed

SECONDS_OF_OTHERS = 60.0


class LightWorker:
    """A worker without a model."""

    def __init__(self, rank: int, size: int, threads: int, directory: str):  # noqa: ARG002
        self.rank = rank

    def echo(self, value: object) -> tuple[int, object]:
        return self.rank, value

    def fail(self, rank: int) -> None:
        if self.rank == rank:
            raise RuntimeError("on purpose")
        time.sleep(SECONDS_OF_OTHERS)

    def count(self, failing: int) -> Iterator[int]:
        yield 0
        self.fail(failing)

    def drain(self, _method: str, failing: int) -> None:
        self.fail(failing)


class CountedPickles:
    """Counts how often this process pickles it."""

    pickled = 0

    def __reduce__(self) -> tuple[Any, ...]:
        CountedPickles.pickled += 1
        return str, ("unpickled",)


@pytest.fixture
def cluster_of(ray_here) -> Iterator[Any]:
    from thresher.runtime.ray.cluster import Cluster, ResourceManager

    opened: list[Any] = []

    def start(size: int) -> Any:
        opened.append(ResourceManager({"actor_train": PolicyConfig(num_workers=size)}, None, concurrent=True))
        opened.append(Cluster("actor_train", LightWorker, opened[-1]))
        return opened[-1]

    yield start
    for each in reversed(opened):
        each.close()


def test_a_call_needs_one_request_of_ray_for_any_number_of_workers(cluster_of, monkeypatch):
    import ray

    counted = {"get": 0, "wait": 0}

    def counting(name: str, function: Any) -> Any:
        def call(*arguments: Any, **more: Any) -> Any:
            counted[name] += 1
            return function(*arguments, **more)

        return call

    cluster = cluster_of(6)
    cluster.call("echo", 0)
    for name in counted:
        monkeypatch.setattr(ray, name, counting(name, getattr(ray, name)))
    assert cluster.call("echo", 7) == [(rank, 7) for rank in range(6)]
    assert counted == {"get": 1, "wait": 0}


def test_an_argument_is_pickled_once_for_all_workers(cluster_of):
    cluster, CountedPickles.pickled = cluster_of(3), 0
    assert cluster.call("echo", CountedPickles()) == [(rank, "unpickled") for rank in range(3)]
    assert CountedPickles.pickled == 1


@pytest.mark.parametrize("how", ["call", "stream"])
def test_the_first_failure_is_raised_without_waiting_for_the_others(cluster_of, how):
    cluster = cluster_of(3)
    cluster.call("echo", 0)  # the workers have started
    started = time.monotonic()
    with pytest.raises(WorkerError, match=r"actor_train worker 1 of 3 failed: .*on purpose"):
        cluster.call("fail", 1) if how == "call" else list(cluster.stream(LightWorker.count, 1))
    assert time.monotonic() - started < SECONDS_OF_OTHERS / 4


@pytest.mark.parametrize("name", ["get", "put"])
def test_an_error_of_ray_in_no_call_of_a_worker_is_one_that_a_restart_handles(cluster_of, monkeypatch, name):
    import ray
    from ray.exceptions import RaySystemError

    function = getattr(ray, name)

    def fail(value: Any, **more: Any) -> Any:
        if isinstance(value, list):
            raise RaySystemError("on purpose")
        return function(value, **more)

    cluster = cluster_of(2)
    monkeypatch.setattr(ray, name, fail)
    with pytest.raises(WorkerLostError, match=r"Ray has failed: .*on purpose"):
        cluster.call("echo", ["stored"])


@pytest.mark.parametrize(("clock", "offset"), [(99.0, -1.0), (100.0, 0.0), (101.5, 0.0), (104.0, 2.0)])
def test_a_clock_is_wrong_by_what_it_is_outside_of_the_times_of_the_question(clock, offset):
    from thresher.runtime.ray.cluster import clock_offset

    assert clock_offset(clock, sent=100.0, received=102.0) == offset


def test_a_reservation_that_ray_has_lost_is_an_error_that_a_restart_handles(ray_here):
    from ray.util.placement_group import placement_group, remove_placement_group

    from thresher.runtime.ray.cluster import _is_ready

    group = placement_group([{"CPU": 1.0}])
    assert _is_ready(group, 30.0)
    remove_placement_group(group)
    with pytest.raises(ResourceError, match=r"does not exist.*; start the run again"):
        _is_ready(group, 30.0)


class KeeperOf:
    """A keeper that answers after some seconds."""

    def __init__(self, seconds: float):
        self.seconds = seconds

    def command(self) -> str:
        time.sleep(self.seconds)
        return "python"


def test_servers_that_do_not_answer_are_waited_for_together(ray_here):
    import ray

    forks, none = fork_server.ForkServers(), frozenset[tuple[str, str]]()
    keeper = ray.remote(KeeperOf).options(num_cpus=0)
    forks._keepers = {(f"node {n}", none): keeper.remote(0.0 if n == 2 else SECONDS_OF_OTHERS) for n in range(4)}
    ray.get(forks._keepers["node 2", none].command.remote())
    started = time.monotonic()
    assert forks.find([f"node {n}" for n in range(5)], {}) == {"node 2": "python"}
    assert time.monotonic() - started < 2 * fork_server._SECONDS_TO_ANSWER
