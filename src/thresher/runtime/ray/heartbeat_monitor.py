"""Notice a worker that hangs: all are asked now and then what they do, and one that gives no answer is lost.

Each worker answers in a thread of its own, however long its step takes. So no answer means that the process is stopped,
or its machine gone, or that one call holds the interpreter for all that time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayError

from thresher.errors import WorkerLostError
from thresher.observability.heartbeat import Heartbeat

# looks in the timeout, and more where it is long: the last thing that a worker told must not be long ago
_LOOKS = 8
_MOST_SECONDS_BETWEEN_LOOKS = 10.0
# so much of the timeout may an answer take; with the looks before and after it, all fits into the timeout
_SHARE_WITHOUT_ANSWER = 0.75
_SECONDS_TO_START = 300.0
# the methods of a worker in a group have a thread of their own; all others run one after the other in another one
HEARTBEAT_GROUP = "heartbeat"
CONCURRENCY_GROUPS = {HEARTBEAT_GROUP: 1}


@dataclass
class _Watched:
    worker: Any
    name: str
    answer: Any
    last: Heartbeat | None = None
    missed: int = 0


class HeartbeatMonitor:
    """Wait for results of workers, and look after all workers meanwhile.

    What counts is looks, not time: a driver that was suspended finds old questions, and gives everyone time to answer.
    """

    def __init__(self, heartbeat_timeout: float = math.inf):
        self._patience = _SHARE_WITHOUT_ANSWER * heartbeat_timeout
        self._seconds = min(heartbeat_timeout / _LOOKS, _MOST_SECONDS_BETWEEN_LOOKS)
        self._next_look = time.monotonic()
        self._watched: list[_Watched] = []

    def add(self, name: str, workers: Sequence[Any]) -> None:
        """Look after the workers of a role."""
        for rank, worker in enumerate(workers):
            self._watched.append(_Watched(worker, f"{name} worker {rank} of {len(workers)}", worker.heartbeat.remote()))

    def remove(self, workers: Sequence[Any]) -> None:
        gone = set(map(id, workers))
        self._watched = [each for each in self._watched if id(each.worker) not in gone]

    def wait_any(self, refs: list[Any]) -> tuple[Any, list[Any]]:
        """Wait for the first of some results; return it and the others. A worker that hangs is a LostError."""
        while True:
            if time.monotonic() >= self._next_look:
                self._look()
                self._next_look = time.monotonic() + self._seconds
            timeout = max(0.0, self._next_look - time.monotonic()) if self._watched else None
            ready, others = ray.wait(refs, num_returns=1, timeout=timeout)
            if ready:
                return ready[0], others

    def _look(self) -> None:
        asked = [each for each in self._watched if each.answer is not None]
        answers = [each.answer for each in asked]
        ready = set(ray.wait(answers, num_returns=len(answers), timeout=0)[0]) if answers else set()
        for each in asked:
            if each.answer in ready:
                self._take_answer(each)
                continue
            each.missed += 1
            seconds = each.missed * self._seconds
            is_starting = each.last is None
            if seconds >= (max(self._patience, _SECONDS_TO_START) if is_starting else self._patience):
                raise WorkerLostError(_unresponsive_message(each, seconds))

    def _take_answer(self, each: _Watched) -> None:
        each.missed = 0
        try:
            each.last = ray.get(each.answer)
        except ActorDiedError:  # whoever waits for its work is told so
            each.answer = None
            return
        except RayError:  # out of reach for a moment
            pass
        each.answer = each.worker.heartbeat.remote()


def _unresponsive_message(watched: _Watched, seconds: float) -> str:
    last, activity = watched.last, "it has not reported any activity"
    if last is not None:
        started = f"started {time.time() - last.started_at:.0f} s ago"
        activity = f"last activity, {started}: {last.activity} (process {last.process})"
    return (
        f"{watched.name} is unresponsive: no heartbeat for {seconds:.0f} s; {activity}\nfinished checkpoints are "
        "valid: check that machine, then rerun the same command to resume from the newest"
    )
