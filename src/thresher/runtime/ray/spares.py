"""Spare workers: idle processes that have imported everything and replace the workers of a run after a failure.

Starting a process and importing torch and transformers takes most of the time of a restart. A spare has done both, has
not touched its device, and waits. It is used for one rank only: the rank whose node and GPU it can see.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import ray
from ray.exceptions import RayError

from thresher.observability.details import DETAIL
from thresher.runtime.ray.starter import WorkerStarter

logger = logging.getLogger(__name__)

# short runs end before; spares would compete with their workers for the cores
_SECONDS_BEFORE_SPARES = 20.0
# for the processes of the failed attempt to end, and for the answers of the spares
_SECONDS_TO_TAKE_OVER = 15.0
# spares that end by themselves, such as by lack of memory, are not started again and again
_MAX_LOST = 5


@dataclass(frozen=True)
class WorkerProcess:
    """The process of a worker. started: when, in seconds since the epoch; the pid may be used again later.

    visible_devices: the GPU that Ray assigned to it. import_seconds: how long it took to import its code.
    """

    pid: int
    started: float
    visible_devices: str | None
    import_seconds: float


class RunningWorkers(Protocol):
    """The workers of a role, how they were started, and their processes by rank."""

    name: str
    workers: list[Any]
    starter: WorkerStarter
    processes: list[WorkerProcess]


@dataclass(frozen=True)
class _Rank:
    """A running worker. num_spares: how many to keep for it. model: a running worker whose imports a spare repeats."""

    role: str
    rank: int
    starter: WorkerStarter
    process: WorkerProcess
    num_spares: int
    model: Any

    @property
    def node(self) -> str:
        return self.starter.placements[self.rank].node.node_id

    @property
    def key(self) -> tuple[str, int]:
        return self.role, self.rank


@dataclass
class _Spare:
    worker: Any
    rank: _Rank
    reply: Any
    is_ready: bool = False


class SparePool:
    """The spares of all roles, `per_worker` for each of their workers."""

    def __init__(self, per_worker: int):
        self._per_worker = per_worker
        self._ranks: list[_Rank] = []
        self._spares: list[_Spare] = []
        self._start_at = 0.0
        self._num_lost = 0
        self._was_complete = False

    @property
    def num_ready(self) -> int:
        return sum(spare.is_ready for spare in self._spares)

    def watch(self, cluster: RunningWorkers, *, is_replaced: bool) -> None:
        """Follow the workers of a role. is_replaced: keep spares for them."""
        self.forget(cluster.name)
        count, model = self._per_worker if is_replaced else 0, cluster.workers[0]
        self._ranks += [
            _Rank(cluster.name, rank, cluster.starter, process, count, model)
            for rank, process in enumerate(cluster.processes)
        ]
        self._start_at = time.monotonic() + _SECONDS_BEFORE_SPARES
        self._num_lost, self._was_complete = 0, False

    def forget(self, role: str) -> None:
        """Stop to follow the workers of a role, which are not needed again."""
        self._ranks = [each for each in self._ranks if each.role != role]

    def maintain(self) -> None:
        """Remove spares that have ended, and start missing ones; called every few seconds during a run."""
        self._receive()
        if time.monotonic() < self._start_at or self._num_lost >= _MAX_LOST:
            return
        for rank in self._ranks:
            count = sum(spare.rank.key == rank.key for spare in self._spares)
            for _ in range(rank.num_spares - count):
                self._spares.append(self._start(rank))
        if self._spares and self.num_ready == len(self._spares) and not self._was_complete:
            self._was_complete = True
            logger.info("%d spare workers are ready", self.num_ready, extra=DETAIL)

    def take_over(self) -> bool:
        """Wait until the processes of the failed attempt have ended; return whether spares answer on all their nodes.

        The spares do the waiting: they see the processes of their node. Without an answer the node may be lost.
        """
        self._receive()
        ready = [spare for spare in self._spares if spare.is_ready]
        nodes = {rank.node for rank in self._ranks}
        if not nodes or nodes != {spare.rank.node for spare in ready}:
            return False
        asked: dict[Any, _Spare] = {}
        for node in nodes:
            first, *others = (spare for spare in ready if spare.rank.node == node)
            ended = [(rank.process.pid, rank.process.started) for rank in self._ranks if rank.node == node]
            asked[first.worker.await_exit.remote(ended)] = first
            asked |= {spare.worker.await_exit.remote([]): spare for spare in others}
        done, late = ray.wait(list(asked), num_returns=len(asked), timeout=_SECONDS_TO_TAKE_OVER)
        lost = [asked[ref] for ref in late] + [asked[ref] for ref in done if not _succeeds(ref)]
        self._remove(lost)
        self._ranks = []  # until the next attempt has started its workers
        return nodes == {spare.rank.node for spare in self._spares if spare.is_ready}

    def take(self, role: str, rank: int) -> Any | None:
        """Return a spare to become the worker of a rank, None if none is ready."""
        for spare in self._spares:
            if spare.is_ready and spare.rank.key == (role, rank):
                self._spares.remove(spare)
                return spare.worker
        return None

    def close(self) -> None:
        """End all spares."""
        self._remove(list(self._spares))
        self._ranks = []

    def _start(self, rank: _Rank) -> _Spare:
        worker = rank.starter.start_spare(rank.rank, rank.process.visible_devices)
        return _Spare(worker, rank, worker.warm_up.remote(rank.model.imported_modules.remote()))

    def _receive(self) -> None:
        """Read the answers of all spares: the first one says that a spare is ready, later ones that it lives."""
        replies = {spare.reply: spare for spare in self._spares}
        done = ray.wait(list(replies), num_returns=len(replies), timeout=0)[0] if replies else []
        for ref in done:
            spare = replies[ref]
            if _succeeds(ref):
                spare.is_ready, spare.reply = True, spare.worker.heartbeat.remote()
                continue
            self._remove([spare])
            self._num_lost += 1
            self._was_complete = False
            more = "no other is started" if self._num_lost >= _MAX_LOST else "starting another one"
            logger.info("a spare of %s worker %d ended; %s", spare.rank.role, spare.rank.rank, more, extra=DETAIL)

    def _remove(self, spares: Sequence[_Spare]) -> None:
        for spare in spares:
            self._spares.remove(spare)
            ray.kill(spare.worker, no_restart=True)


def _succeeds(ref: Any) -> bool:
    try:
        ray.get(ref)
    except RayError:
        return False
    return True
