"""Detect hung workers: poll the heartbeat of every worker, and raise if one does not reply within the timeout.

Each worker replies in a separate thread, however long its step takes. A missing reply means that the process is
stopped, its machine is gone, or a call has held the GIL for the whole timeout. Workers that reply but do not advance
are stuck, usually in a collective that one of them never enters.
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
from thresher.runtime.stalls import StallDetector, poll_interval

# the fraction of the timeout that a reply may take; the rest covers the polls before and after it
_REPLY_FRACTION = 0.75
_SECONDS_TO_START = 300.0
_SECONDS_TO_REPORT = 10.0
_MISSED_OF_SUSPECT = 2
_MAX_NAMED = 4
# methods in this concurrency group run in a separate thread; all other methods share one
HEARTBEAT_GROUP = "heartbeat"
CONCURRENCY_GROUPS = {HEARTBEAT_GROUP: 1}


@dataclass
class _Monitored:
    worker: Any
    name: str
    reply: Any
    last: Heartbeat | None = None
    missed: int = 0


class HeartbeatMonitor:
    """Polls the heartbeats of all workers, called by whatever waits for their results.

    It counts missed polls, not time: after the driver was suspended, the workers still have time to reply.
    """

    def __init__(self, heartbeat_timeout: float = math.inf):
        self._reply_timeout = _REPLY_FRACTION * heartbeat_timeout
        self._interval = poll_interval(heartbeat_timeout)
        self._next_poll = time.monotonic()
        self._monitored: list[_Monitored] = []
        self._stalls = StallDetector(heartbeat_timeout, self._interval)

    def add(self, name: str, workers: Sequence[Any]) -> None:
        """Monitor the workers of a role."""
        for rank, worker in enumerate(workers):
            self._monitored.append(
                _Monitored(worker, f"{name} worker {rank} of {len(workers)}", worker.heartbeat.remote())
            )

    def remove(self, workers: Sequence[Any]) -> None:
        removed = set(map(id, workers))
        self._monitored = [each for each in self._monitored if id(each.worker) not in removed]

    def poll(self) -> float:
        """Poll the heartbeats if it is time; return the seconds until the next poll. A hung worker raises."""
        if not self._monitored:
            return math.inf
        if time.monotonic() >= self._next_poll:
            self._poll()
            self._next_poll = time.monotonic() + self._interval
        return max(0.0, self._next_poll - time.monotonic())

    def _poll(self) -> None:
        alive = [each for each in self._monitored if each.reply is not None]
        replies = [each.reply for each in alive]
        ready = set(ray.wait(replies, num_returns=len(replies), timeout=0)[0]) if replies else set()
        for each in alive:
            if each.reply in ready:
                self._receive(each)
                continue
            each.missed += 1
            seconds = each.missed * self._interval
            is_starting = each.last is None
            if seconds >= (max(self._reply_timeout, _SECONDS_TO_START) if is_starting else self._reply_timeout):
                raise WorkerLostError(_unresponsive_message(each, seconds))
        # a worker that does not reply is the likely cause of others that wait for it, and is reported when it is due
        if any(each.missed >= _MISSED_OF_SUSPECT for each in alive):
            return
        started = [each for each in alive if each.last is not None]
        seconds_stuck = self._stalls.seconds_stuck([each.last for each in started if each.last is not None])
        if seconds_stuck is None:
            return
        # their logs show where each one waits; workers that are too busy to write it are not waited for
        reports = [each.worker.report_stall.remote() for each in started]
        ray.wait(reports, num_returns=len(reports), timeout=_SECONDS_TO_REPORT)
        raise WorkerLostError(_stuck_message(started, seconds_stuck))

    def _receive(self, each: _Monitored) -> None:
        each.missed = 0
        try:
            each.last = ray.get(each.reply)
        except ActorDiedError:  # raised where a result of the worker is awaited
            each.reply = None
            return
        except RayError:  # temporarily unreachable
            pass
        each.reply = each.worker.heartbeat.remote()


def _unresponsive_message(monitored: _Monitored, seconds: float) -> str:
    last, activity = monitored.last, "it has not reported any activity"
    if last is not None:
        started = f"started {time.time() - last.started_at:.0f} s ago"
        activity = f"last activity, {started}: {last.activity} (process {last.process})"
    return (
        f"{monitored.name} is unresponsive: no heartbeat for {seconds:.0f} s; {activity}\nfinished checkpoints are "
        "valid: check that machine, then rerun the same command to resume from the newest"
    )


def _stuck_message(monitored: Sequence[_Monitored], seconds: float) -> str:
    """Name the workers that have finished the fewest operations: the others wait for them."""
    known = [(each.name, each.last) for each in monitored if each.last is not None and each.last.pace != "unknown"]
    known.sort(key=lambda each: each[1].progress)
    named = [f"{name}, {last.activity} (process {last.process})" for name, last in known[:_MAX_NAMED]]
    more = f"; and {len(known) - len(named)} more" if len(known) > len(named) else ""
    return (
        f"workers are stuck: none has made progress for {seconds:.0f} s; {'; '.join(named)}{more}; their logs have "
        "their stacks\nfinished checkpoints are valid: look for the cause there, then rerun the same command to resume "
        "from the newest"
    )
