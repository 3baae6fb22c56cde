"""Cluster: the workers of one role as Ray actors, called together; the first failure of any is the failure of all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from thresher.errors import UserError, WorkerError, WorkerLostError
from thresher.runtime.ray.heartbeat_monitor import CONCURRENCY_GROUPS, HeartbeatMonitor
from thresher.runtime.ray.resources import ResourceManager


@dataclass(frozen=True)
class WorkerConfig:
    """What the workers of a role have in common; ranks that compute together join one process group."""

    role: str
    joins_process_group: bool


class Cluster:
    """Start a worker at each place of a role.

    A survivor of a group would wait for a dead peer until a time-out, so the first failure ends them all, and it
    reaches the caller as the worker's own message.
    """

    def __init__(
        self,
        name: str,
        worker_cls: type,
        resource_manager: ResourceManager,
        worker_config: WorkerConfig,
        watch: HeartbeatMonitor | None = None,
    ):
        self.name = name
        self.watch = watch or HeartbeatMonitor()
        places = resource_manager.places(worker_config.role)
        remote = ray.remote(concurrency_groups=CONCURRENCY_GROUPS)(worker_cls)
        self.workers = [
            remote.options(
                num_cpus=place.num_cpus,
                num_gpus=place.num_gpus,
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group=resource_manager.group(place.owner), placement_group_bundle_index=place.bundle
                ),
            ).remote(rank, len(places), place.threads, str(Path.cwd()))
            for rank, place in enumerate(places)
        ]
        if watch is not None:
            watch.add(name, self.workers)
        if worker_config.joins_process_group:
            (address,) = wait_for([Call(self, 0, self.workers[0].start_rendezvous.remote())])
            self.call("join", address)

    def __len__(self) -> int:
        return len(self.workers)

    def call(self, method: str, *arguments: object) -> list[Any]:
        """Call a method of every worker; return their answers by rank."""
        return wait_for(self.submit(method, *arguments))

    def submit(self, method: str, *arguments: object) -> list[Call]:
        """Begin a call of every worker, to be awaited with `wait_for`."""
        return [Call(self, rank, getattr(each, method).remote(*arguments)) for rank, each in enumerate(self.workers)]

    def stream(self, method: str, others_method: str, *arguments: object) -> Iterator[Any]:
        """Yield what a generator method of rank 0 yields, while the other ranks run theirs."""
        first, *others = self.workers
        stream = getattr(first, method).options(num_returns="streaming").remote(*arguments)
        calls = [
            Call(self, rank, getattr(worker, others_method).remote(*arguments))
            for rank, worker in enumerate(others, start=1)
        ]
        running = {call.ref: call for call in calls}
        pending = [stream, *running]
        while pending:
            ready, pending = self.watch.wait_any(pending)
            if ready is not stream:
                running[ready].answer()
                continue
            try:
                record = next(stream)
            except StopIteration:
                continue
            pending.append(stream)
            yield Call(self, 0, record).answer()

    def close(self) -> None:
        """End every worker at once."""
        self.watch.remove(self.workers)
        for worker in self.workers:
            ray.kill(worker, no_restart=True)


@dataclass(frozen=True)
class Call:
    """Something that a worker was asked for."""

    cluster: Cluster
    rank: int
    ref: Any

    def answer(self) -> Any:
        """Take the answer; a failure ends the worker's whole cluster."""
        try:
            return ray.get(self.ref)
        except RayError as error:
            self.cluster.close()
            _fail(error, f"{self.cluster.name} worker {self.rank} of {len(self.cluster)}")


def wait_for(calls: Sequence[Call]) -> list[Any]:
    """Wait for calls, of one cluster or several; whichever fails first is told at once, whoever is still busy."""
    running = {call.ref: call for call in calls}
    pending = list(running)
    while pending:
        ready, pending = calls[0].cluster.watch.wait_any(pending)
        running[ready].answer()
    return [call.answer() for call in calls]


def _fail(error: RayError, worker: str) -> NoReturn:
    """Raise a worker's failure here: a mistake that a person can mend as it is, anything else with who and where."""
    cause = error.cause if isinstance(error, RayTaskError) else None
    if isinstance(cause, UserError):
        raise cause from None
    if isinstance(error, RayActorError):
        raise WorkerLostError(
            f"{worker} died: {_reason(error)}\nfinished checkpoints are whole, so look for the cause (often memory) "
            "and start the run again: it goes on from the newest"
        ) from None
    lines = str(error).strip().splitlines()
    raise WorkerError(f"{worker} failed: {lines[-1].strip()}\n{error}") from None


def _reason(error: RayActorError) -> str:
    """What Ray knows of a death, on one line: the facts stand below its first line, one of them a line."""
    lines = [line.strip().rstrip(".") for line in str(error).splitlines() if line.strip()]
    if "creation task" in lines[0]:  # of a worker that could not be made, the last line says why
        return lines[-1]
    where = [line for line in lines[1:] if line.startswith(("pid:", "ip:"))]
    why = [line for line in lines[1:] if line.startswith(("The actor", "Worker ", "The node", "The owner"))]
    reason = (why or lines)[0]
    return f"{reason} ({', '.join(where)})" if where else reason
