"""Messages about workers that died, one line instead of Ray's report; and a worker that only takes long to start."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

HEAD = (
    "The actor died unexpectedly before finishing this task.\n\tclass_name: A\n\tactor_id: 82cad2\n\tpid: 27372\n"
    "\tnamespace: 8c735cfa\n\tip: 192.0.2.2\n"
)
GONE = "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: "
CAUSES = (
    "Some common causes include: (1) the process was killed by the OOM killer due to high memory usage, (2) ray stop"
)


def cause_of(report: str) -> str:
    # imported here: the environment of Ray must be set before its import
    from ray.exceptions import RayActorError

    from thresher.runtime.ray.cluster import death_cause

    return death_cause(RayActorError(error_msg=report))


@pytest.mark.parametrize(
    ("report", "cause"),
    [
        (
            f"{GONE}Worker unexpectedly exits with a connection error code 2. End of file. {CAUSES}",
            "killed by a signal, often SIGKILL because memory ran out",
        ),
        (f"{GONE}Worker exits unexpectedly. Worker exits with an exit code 4.", "exit code 4"),
        (
            f"{GONE}Worker exits unexpectedly. Worker exits with an exit code 1. The process receives a SIGTERM.",
            "SIGTERM",
        ),
        (
            "The actor is dead because it was killed by `ray.kill`.",
            "The actor is dead because it was killed by `ray.kill`",
        ),
        (f"The actor is dead because its node has died. {CAUSES}", "The actor is dead because its node has died"),
    ],
)
def test_a_death_is_reported_by_exit_code_or_signal_and_process(report, cause):
    assert cause_of(HEAD + report) == f"{cause} (process 27372 on 192.0.2.2)"


def test_a_failed_constructor_is_reported_by_its_error():
    assert cause_of("The actor died because of an error raised in its creation task\nKeyError: 3") == "KeyError: 3"


@pytest.mark.distributed
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
    while not ray.wait([started], timeout=monitor.poll())[0]:
        pass
    ray.kill(worker)
