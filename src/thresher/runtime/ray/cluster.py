"""The workers of one role as Ray actors, called collectively, and the resources that are reserved for them."""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NoReturn, TypeVar

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from thresher.builders.preflight.machine import check_clocks
from thresher.config.roles import RoleConfig
from thresher.distributed.groups import is_lost_connection
from thresher.errors import ResourceError, UserError, WorkerError, WorkerLostError
from thresher.observability.details import DETAIL
from thresher.observability.run_log import worker_log
from thresher.runtime.ray.fork_server import ForkServers
from thresher.runtime.ray.heartbeat_monitor import CONCURRENCY_GROUPS, HeartbeatMonitor
from thresher.runtime.ray.placement import Node, bundles_of, place_roles

logger = logging.getLogger(__name__)

T = TypeVar("T")
# free resources are reserved within a second, 1,024 bundles within some; longer means that other work uses them
_SECONDS_TO_RESERVE = 60.0
_SECONDS_PER_BUNDLE = 0.1
_SECONDS_BETWEEN_CHECKS = 2.0
_SECONDS_FOR_CAUSE = 5.0
# how late a failure of another worker is noticed while rank 0 streams
_SECONDS_BETWEEN_RECORDS = 0.2


class ResourceManager:
    """Reserve the resources of every role, each bundle on the node of its device ids, before any worker is started."""

    def __init__(self, roles: Mapping[str, RoleConfig], devices_per_node: int | None, *, concurrent: bool):
        self.placements = place_roles(alive_nodes(), roles, devices_per_node, concurrent=concurrent)
        self.groups: dict[str, Any] = {}  # Ray's placement group of each role that owns bundles
        try:
            for role in roles:
                self.reserve(role)
        except BaseException:
            self.close()
            raise

    def release(self, role: str) -> None:
        """Release the bundles that this role owns; bundles owned by other roles stay reserved."""
        if role in self.groups:
            remove_placement_group(self.groups.pop(role))

    def close(self) -> None:
        for role in list(self.groups):
            self.release(role)

    def reserve(self, owner: str) -> None:
        """Reserve the bundles that a role owns, unless they are."""
        bundles = bundles_of(owner, self.placements)
        if not bundles or owner in self.groups:
            return
        # a device id belongs to a node, so each bundle is pinned to its node
        selectors = [{"ray.io/node-id": node.node_id} for node, _ in bundles]
        group = placement_group([amounts for _, amounts in bundles], strategy="PACK", bundle_label_selector=selectors)
        self.groups[owner] = group
        allowed = _SECONDS_TO_RESERVE + _SECONDS_PER_BUNDLE * len(bundles)
        deadline = time.monotonic() + allowed
        while not _is_ready(group, min(allowed, _SECONDS_BETWEEN_CHECKS)):
            alive = {node.node_id for node in alive_nodes()}
            if gone := {node.address for node, _ in bundles if node.node_id not in alive}:
                raise ResourceError(f"the node at {', '.join(sorted(gone))} left the cluster; start the run again")
            if time.monotonic() < deadline:
                continue
            free = {name: ray.available_resources().get(name, 0.0) for name in ("GPU", "CPU")}
            requested = {name: sum(amounts.get(name, 0.0) for _, amounts in bundles) for name in free}
            raise ResourceError(
                f"{owner} requests {requested['GPU']:g} GPUs and {requested['CPU']:g} CPUs, but other work uses them "
                f"({free['GPU']:g} GPUs and {free['CPU']:g} CPUs are free); wait for it to end, or use other devices"
            )


def _is_ready(group: PlacementGroup, seconds: float) -> bool:
    try:
        return bool(group.wait(seconds))
    except Exception as error:  # Ray has no class for a group that is lost with this process's node
        raise ResourceError(f"Ray reserves no resources: {error}; start the run again") from None


def alive_nodes() -> list[Node]:
    """List the nodes in the order of their device ids: the head first, then by address."""
    found = []
    for node in ray.nodes():
        if node["Alive"]:
            resources, address = node["Resources"], node["NodeManagerAddress"]
            is_worker = "node:__internal_head__" not in resources
            found.append((is_worker, address, node["NodeID"], resources.get("CPU", 0.0), int(resources.get("GPU", 0))))
    return [Node(node_id, address, cpus, gpus) for _, address, node_id, cpus, gpus in sorted(found)]


class Cluster:
    """Starts one worker per placement of a role, each in the bundle that is reserved for it.

    Surviving workers would wait for a dead peer until a collective times out, so the first failure kills all workers
    and is raised in the caller.
    """

    def __init__(
        self,
        role: str,
        worker_cls: type,
        resources: ResourceManager,
        environment: Mapping[str, str] | None = None,
        monitor: HeartbeatMonitor | None = None,
        log_dir: Path | None = None,
        forks: ForkServers | None = None,
    ):
        self.name = role
        self.log_dir = log_dir  # of the run, for error messages
        self.monitor = monitor or HeartbeatMonitor()
        self.environment = dict(environment or {})
        self.placements = placements = resources.placements[role]
        self.first_ranks: dict[str, int] = {}  # of each node
        for rank, placement in enumerate(placements):
            self.first_ranks.setdefault(placement.node.node_id, rank)
        self.nodes = list(self.first_ranks)
        pythons = forks.find(self.nodes, self.environment) if forks else {}
        remote = ray.remote(concurrency_groups=CONCURRENCY_GROUPS)(worker_cls)
        self.workers = [
            remote.options(
                num_cpus=placement.num_cpus,
                num_gpus=placement.num_gpus,
                max_restarts=0,
                runtime_env=_runtime_env(self.environment, pythons.get(placement.node.node_id)),
                # Ray waits until a previous process in the bundle has ended
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group=resources.groups[placement.owner], placement_group_bundle_index=placement.bundle
                ),
            ).remote(rank, len(placements), placement.threads, str(Path.cwd()))
            for rank, placement in enumerate(placements)
        ]
        if monitor is not None:
            monitor.add(role, self.workers)

    def __len__(self) -> int:
        return len(self.workers)

    @property
    def num_nodes(self) -> int:
        return len(self.nodes)

    def call(self, method: str, *arguments: object) -> list[Any]:
        """Call a method of every worker; return the results by rank."""
        return wait_for(self.submit(method, *arguments))

    def on_all(self, method: Callable[..., T], *arguments: object) -> T:
        result: T = self.call(method.__name__, *arguments)[0]
        return result

    def submit(self, method: str, *arguments: object) -> list[Call]:
        """Start a call of every worker, to be awaited with `wait_for`."""
        arguments = _put_once(arguments)
        return [Call(self, rank, getattr(each, method).remote(*arguments)) for rank, each in enumerate(self.workers)]

    def stream(self, method: Callable[..., Iterator[T]], *arguments: object) -> Iterator[T]:
        name, (first, *others), arguments = method.__name__, self.workers, _put_once(arguments)
        stream = getattr(first, name).options(num_returns="streaming").remote(*arguments)
        calls = [Call(self, rank, each.drain.remote(name, *arguments)) for rank, each in enumerate(others, start=1)]
        # Ray reports the end of each call once, so that a record costs the same for any number of workers
        ended: SimpleQueue[Call] = SimpleQueue()
        for call in calls:
            call.ref.future().add_done_callback(partial(_enqueue, ended, call))
        while True:
            is_ready, _ = ray.wait([stream], timeout=min(_SECONDS_BETWEEN_RECORDS, self.monitor.poll()))
            while not ended.empty():
                ended.get().result()
            if is_ready:
                try:
                    record = next(stream)
                except StopIteration:
                    break
                yield Call(self, 0, record).result()
        wait_for(calls)

    def compare_clocks(self) -> list[str]:
        """Return a warning for each node of a run on several whose clock differs from the driver's."""
        if self.num_nodes < 2:
            return []
        ranks = self.first_ranks.values()
        sent = time.time()
        clocks = wait_for([Call(self, rank, self.workers[rank].clock.remote()) for rank in ranks])
        addresses = [f"the node at {self.placements[rank].node.address}" for rank in ranks]
        offsets = [clock_offset(clock, sent, time.time()) for clock in clocks]
        return check_clocks(dict(zip(addresses, offsets, strict=True)), "the driver")

    def close(self) -> None:
        self.monitor.remove(self.workers)
        for worker in self.workers:
            ray.kill(worker, no_restart=True)


def clock_offset(clock: float, sent: float, received: float) -> float:
    """Return by how much another clock is at least ahead, if it was read between two times; negative if behind."""
    return max(0.0, clock - received) + min(0.0, clock - sent)


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
    refs = [call.ref for call in calls]
    while refs:
        seconds = calls[0].cluster.monitor.poll()
        try:
            # one request for all results, which ends with the first failure
            return ray.get(refs, timeout=None if math.isinf(seconds) else seconds)  # type: ignore[no-any-return]
        except GetTimeoutError:
            continue
        except RayError as error:
            ended = set(ray.wait(refs, num_returns=len(refs), timeout=0)[0])
            for call in calls:
                if call.ref in ended:
                    call.result()
            raise _lost_connection(error) from error  # of this process to Ray: no worker's call has failed
    return []


def _runtime_env(environment: Mapping[str, str], python: str | None) -> dict[str, Any] | None:
    found = {"env_vars": dict(environment)} if environment else {}
    return {**found, "py_executable": python} if python else found or None


def _enqueue(queue: SimpleQueue[Call], call: Call, _: object) -> None:
    queue.put(call)


def _put_once(arguments: tuple[object, ...]) -> tuple[object, ...]:
    """Store arguments in Ray, which would pickle them for each worker; short ones travel with the call."""
    try:
        return tuple(each if isinstance(each, str | int | float | Path | None) else ray.put(each) for each in arguments)
    except RayError as error:
        raise _lost_connection(error) from error


def _lost_connection(error: RayError) -> WorkerLostError:
    return WorkerLostError(
        f"Ray has failed: {str(error).strip()}\nrerun the same command to resume from the newest checkpoint"
    )


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
