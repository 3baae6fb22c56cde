"""Notice a worker that hangs: all are asked now and then what they do, and one that gives no answer is lost.

Each worker answers in a thread of its own, however long its step takes. So no answer means that the process is stopped,
or its machine gone, or that one call holds the interpreter for all that time.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError

from thresher.errors import LostError
from thresher.observe.pulse import Pulse

# an answer is missed when it is not there so many looks later; with the look that asks, all fit into the timeout
_LOOKS = 8
_LOOKS_WITHOUT_ANSWER = 6
_SECONDS_TO_START = 300.0
# the methods of a worker in a group have threads of their own; all others run one after the other in the main thread
PULSE_GROUP = "pulse"
CONCURRENCY_GROUPS = {PULSE_GROUP: 1}


@dataclass
class _Watched:
    worker: Any
    name: str
    answer: Any
    last: Pulse | None = None
    missed: int = 0


class Watch:
    """Wait for results of workers, and look after all workers meanwhile.

    What counts is looks, not time: a driver that was suspended finds old questions, and gives everyone time to answer.
    """

    def __init__(self, hang_timeout: float = math.inf):
        self._seconds = hang_timeout / _LOOKS
        self._next_look = time.monotonic()
        self._watched: list[_Watched] = []

    def add(self, name: str, workers: Sequence[Any]) -> None:
        """Look after the workers of a role."""
        for rank, worker in enumerate(workers):
            self._watched.append(_Watched(worker, f"{name} worker {rank} of {len(workers)}", worker.pulse.remote()))

    def remove(self, workers: Sequence[Any]) -> None:
        self._watched = [each for each in self._watched if each.worker not in workers]

    def first(self, refs: list[Any]) -> tuple[Any, list[Any]]:
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
        for each in self._watched:
            if each.answer is None:
                continue
            if ray.wait([each.answer], timeout=0)[0]:
                self._take_answer(each)
                continue
            each.missed += 1
            limit = _LOOKS_WITHOUT_ANSWER
            if each.last is None:  # still importing
                limit = max(limit, math.ceil(_SECONDS_TO_START / self._seconds))
            if each.missed >= limit:
                raise LostError(_hangs(each, each.missed * self._seconds))

    def _take_answer(self, each: _Watched) -> None:
        answer, each.answer, each.missed = each.answer, None, 0
        with contextlib.suppress(RayError):  # it died, and whoever waits for its work is told so
            each.last = ray.get(answer)
            each.answer = each.worker.pulse.remote()


def _hangs(watched: _Watched, seconds: float) -> str:
    last, words = watched.last, "it has not begun anything"
    if last is not None:
        words = f"the last thing it did, {time.time() - last.since:.0f} s ago: {last.doing} (process {last.process})"
    return (
        f"{watched.name} hangs: no answer for {seconds:.0f} s; {words}; finished checkpoints are whole, so look at "
        "that machine and start the run again: it goes on from the newest"
    )
