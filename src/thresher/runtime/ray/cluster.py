"""Cluster: the workers of one role as Ray actors, called collectively. The first failure ends all of them."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from thresher.distributed.groups import is_lost_connection
from thresher.errors import UserError, WorkerError, WorkerLostError
from thresher.observability.details import DETAIL
from thresher.observability.run_log import worker_log
from thresher.runtime.ray.heartbeat_monitor import HeartbeatMonitor
from thresher.runtime.ray.resources import ResourceManager
from thresher.runtime.ray.spares import SparePool, WorkerProcess
from thresher.runtime.ray.starter import WorkerConfig, WorkerStarter

logger = logging.getLogger(__name__)

_SECONDS_FOR_CAUSE = 5.0


class Cluster:
    """Starts one worker per placement of a role, or uses the spare of its rank.

    Surviving workers would wait for a dead peer until a collective times out, so the first failure kills all workers
    and is raised in the caller.
    """

    def __init__(
        self,
        name: str,
        worker_cls: type,
        resource_manager: ResourceManager,
        worker_config: WorkerConfig,
        monitor: HeartbeatMonitor | None = None,
        log_dir: Path | None = None,
        spares: SparePool | None = None,
    ):
        """log_dir: the directory of the run's logs, for error messages."""
        self.name = name
        self.log_dir = log_dir
        self.monitor = monitor or HeartbeatMonitor()
        placements = resource_manager.placements[worker_config.role]
        self.num_nodes = len({placement.node.node_id for placement in placements})
        self.starter = WorkerStarter(worker_cls, worker_config, placements, resource_manager.groups)
        taken = [None if spares is None else spares.take(name, rank) for rank in range(len(placements))]
        self.workers = [spare or self.starter.start(rank) for rank, spare in enumerate(taken)]
        self.processes: list[WorkerProcess] = []  # of the workers, once they have claimed their devices
        self.from_spares = [rank for rank, spare in enumerate(taken) if spare is not None]
        if monitor is not None:
            monitor.add(name, self.workers)

    def join_process_group(self) -> None:
        """Connect the workers: the first hosts their rendezvous."""
        (address,) = wait_for([Call(self, 0, self.workers[0].start_rendezvous.remote())])
        self.call("join", address)

    def __len__(self) -> int:
        return len(self.workers)

    def call(self, method: str, *arguments: object) -> list[Any]:
        """Call a method of every worker; return the results by rank."""
        return wait_for(self.submit(method, *arguments))

    def submit(self, method: str, *arguments: object) -> list[Call]:
        """Start a call of every worker, to be awaited with `wait_for`."""
        return [Call(self, rank, getattr(each, method).remote(*arguments)) for rank, each in enumerate(self.workers)]

    def stream(self, method: str, others_method: str, *arguments: object) -> Iterator[Any]:
        """Yield the items of a generator method of rank 0, while the other ranks run `others_method`."""
        first, *others = self.workers
        stream = getattr(first, method).options(num_returns="streaming").remote(*arguments)
        calls = [
            Call(self, rank, getattr(worker, others_method).remote(*arguments))
            for rank, worker in enumerate(others, start=1)
        ]
        running = {call.ref: call for call in calls}
        pending = [stream, *running]
        while pending:
            ready, pending = self.monitor.wait_any(pending)
            if ready is not stream:
                running[ready].result()
                continue
            try:
                record = next(stream)
            except StopIteration:
                continue
            pending.append(stream)
            yield Call(self, 0, record).result()

    def close(self) -> None:
        """Kill every worker."""
        self.monitor.remove(self.workers)
        for worker in self.workers:
            ray.kill(worker, no_restart=True)


@dataclass(frozen=True)
class Call:
    """A pending call of one worker."""

    cluster: Cluster
    rank: int
    ref: Any

    def result(self) -> Any:
        """Wait for the result; a failure closes the cluster of the worker."""
        try:
            return ray.get(self.ref)
        except RayError as error:
            failed = self._dead_peer(error) or (error, self)
            self.cluster.close()
            _fail(*failed)

    def _dead_peer(self, error: RayError) -> tuple[RayError, Call] | None:
        """Return the death of another worker, which this one may have noticed in a collective before Ray does."""
        if not (isinstance(error, RayTaskError) and is_lost_connection(error.cause)):
            return None
        replies = {worker.heartbeat.remote(): rank for rank, worker in enumerate(self.cluster.workers)}
        ready, _ = ray.wait(list(replies), num_returns=len(replies), timeout=_SECONDS_FOR_CAUSE)
        for reply in ready:
            try:
                ray.get(reply)
            except RayActorError as death:
                return death, replace(self, rank=replies[reply])
        return None


def wait_for(calls: Sequence[Call]) -> list[Any]:
    """Wait for calls of one or several clusters; the first failure is raised without waiting for the others."""
    running = {call.ref: call for call in calls}
    pending = list(running)
    while pending:
        ready, pending = calls[0].cluster.monitor.wait_any(pending)
        running[ready].result()
    return [call.result() for call in calls]


def _fail(error: RayError, call: Call) -> NoReturn:
    """Raise a worker's failure in this process: a `UserError` unchanged, any other error with the worker's name."""
    cause = error.cause if isinstance(error, RayTaskError) else None
    if isinstance(cause, UserError):
        raise cause from None
    cluster = call.cluster
    worker = f"{cluster.name} worker {call.rank} of {len(cluster)}"
    if isinstance(error, RayActorError):
        logger.info("Ray's report of the death of %s:\n%s", worker, error, extra=DETAIL)
        log = "" if cluster.log_dir is None else f"; see {worker_log(cluster.log_dir, cluster.name, call.rank)}"
        raise WorkerLostError(
            f"{worker} died: {death_cause(error)}{log}\nfinished checkpoints are valid: look for the cause, then rerun "
            "the same command to resume from the newest"
        ) from None
    lines = str(error).strip().splitlines()
    raise WorkerError(f"{worker} failed: {lines[-1].strip()}\n{error}") from None


def death_cause(error: RayActorError) -> str:
    """Summarize Ray's report of an actor's death in a few words: the exit code if Ray knows it, and the process."""
    report = str(error)
    facts = dict(re.findall(r"^\s*(pid|ip): (\S+)$", report, re.MULTILINE))
    where = f" (process {facts['pid']} on {facts['ip']})" if facts.keys() == {"pid", "ip"} else ""
    return _death_reason(report) + where


def _death_reason(report: str) -> str:
    lines = [line.strip().rstrip(".") for line in report.splitlines() if line.strip()]
    if "creation task" in lines[0]:  # the constructor failed, and the last line says why
        return lines[-1]
    if "SIGTERM" in report:
        return "SIGTERM"
    if code := re.search(r"exit code (\d+)", report):
        return f"exit code {code[1]}"
    if "connection error code" in report:  # Ray only sees that the process is gone
        return "killed by a signal, often SIGKILL because memory ran out"
    # such as "The actor is dead because its node has died"; without Ray's paragraph of possible causes
    why = [line for line in lines[1:] if line.startswith(("The actor", "Worker ", "The node", "The owner"))]
    return (why or lines)[0].partition(". ")[0]
