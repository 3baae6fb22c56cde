"""Faults for chaos runs, injected into real processes and files at random moments."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from chaos_run import ChaosRun, RunFailedError, RunOverError

POLICY, REFERENCE = "actor_train", "reference"
STUCK = "stuck in a collective"
# faults hit at any point of a step, of an evaluation, or between them
LONGEST_DELAY = 0.3
LONGEST_PAUSE, SECONDS_TO_STOP = 5.0, 60.0


@dataclass(frozen=True)
class Done:
    """An injected fault: seconds until the run passed its previous step, and the number of repeated steps.

    detected: seconds until the run noticed a fatal fault.
    """

    kind: str
    seconds: float
    repeated: int
    detected: float | None = None


@dataclass(frozen=True)
class Fault:
    """One kind of fault. `act` injects it, restarts a killed driver, and returns.

    modes, runtimes: the reference modes and the runtimes in which it is possible. is_early: it hits before the first
    step, so it must be ordered before the run starts. is_fatal: the run must restart.
    """

    act: Callable[[ChaosRun, random.Random], None]
    modes: tuple[str, ...] = ("precompute", "concurrent")
    runtimes: tuple[str, ...] = ("local", "torchrun", "ray")
    is_early: bool = False
    is_fatal: bool = True


def suffer(run: ChaosRun, kind: str, draw: random.Random) -> Done:
    """Inject a fault and wait until the run has recovered; raise RunOverError if the run finishes first."""
    fault = FAULTS[kind]
    if not fault.is_early:
        time.sleep(draw.uniform(0, LONGEST_DELAY))
    run.repeated, run.struck, log = 0, time.monotonic(), run.log_file()
    fault.act(run, draw)
    before = run.highest

    def is_over_it() -> bool:
        # records in transit may still arrive; a restarted run truncates its log, which creates a new file
        is_built_again = run.log_file() != log or not fault.is_fatal
        return (run.step() > before and is_built_again) or run.is_over()

    run.wait_until(is_over_it, what=f"a step after {before}, where {kind} hit")
    seconds = time.monotonic() - run.struck
    struck_at, noticed = time.time() - seconds, run.last_failure()
    detected = noticed - struck_at if noticed is not None and noticed > struck_at else None
    return Done(kind, seconds, run.repeated, detected)


def _signal(name: str, number: int) -> Callable[[ChaosRun, random.Random], None]:
    """Send a signal to a worker of a role, or to a process with this title."""

    def act(run: ChaosRun, draw: random.Random) -> None:
        victims = run.workers(name) if name in (POLICY, REFERENCE) else run.processes(name)
        if not victims:
            run.wait_until(run.is_over, what=f"a process of {name} to send a signal to")
            raise RunOverError
        run.struck = time.monotonic()
        os.kill(draw.choice(victims), number)

    return act


def stop_driver(run: ChaosRun, draw: random.Random) -> None:
    """Ask the run to stop, as schedulers do, and start it again."""
    assert run.driver is not None
    run.processes()
    run.struck = time.monotonic()
    run.driver.send_signal(draw.choice([signal.SIGTERM, signal.SIGINT]))
    try:
        run.driver.wait(SECONDS_TO_STOP)
    except subprocess.TimeoutExpired:
        raise RunFailedError(f"has not stopped {SECONDS_TO_STOP} s after a signal; see {run.directory}") from None
    if run.driver.returncode == 0:
        raise RunOverError
    run.start()


def suspend(run: ChaosRun, draw: random.Random) -> None:
    """Stop all processes of the run for a moment, as a laptop or a virtual machine does."""
    pids = [pid for pid in run.processes() if pid != os.getpid()]
    run.struck = time.monotonic()
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        if number == signal.SIGSTOP:
            time.sleep(draw.uniform(0.5, LONGEST_PAUSE))


def kill_raylet(run: ChaosRun, draw: random.Random) -> None:
    if run.nodes is None:
        _signal("raylet", signal.SIGKILL)(run, draw)
        return
    run.processes()
    run.struck = time.monotonic()
    run.nodes.lose_one(draw)


def stall_in_collective(run: ChaosRun, draw: random.Random) -> None:  # noqa: ARG001
    """Keep a rank from entering a collective of a step, while the others wait in it. All of them send heartbeats."""
    order = _order(run, event="collective", path="training", when="before", act="stall")
    run.wait_until(lambda: not order.exists(), what="a collective of a step")
    (taken,) = run.orders.glob("taken-by-*")
    run.struck = time.monotonic() - (time.time() - taken.stat().st_ctime)
    run.wait_until(lambda: taken.read_text()[:1] not in ("", "{"), what="the name of the collective")
    print(f"  stuck before {taken.read_text()}", flush=True)
    taken.unlink()


def kill_driver(run: ChaosRun, draw: random.Random) -> None:  # noqa: ARG001
    _end_driver(run)
    run.start()


def _end_driver(run: ChaosRun) -> None:
    assert run.driver is not None
    run.processes()
    run.struck = time.monotonic()
    run.driver.kill()
    if run.driver.wait() == 0:
        raise RunOverError


def _order(run: ChaosRun, **order: object) -> Path:
    run.orders.mkdir(exist_ok=True)
    path = run.orders / "order.json"
    aside = path.with_suffix(".new")
    aside.write_text(json.dumps(order))
    aside.rename(path)
    return path


def _order_kill(event: str, part: str) -> Callable[[ChaosRun, random.Random], None]:
    """Kill the first process that reaches a call; restart the driver if it was the one."""

    def act(run: ChaosRun, draw: random.Random) -> None:
        order = _order(run, event=event, path=part, when=draw.choice(["before", "after"]), act="kill")
        if run.driver is None:
            run.start()
        assert run.driver is not None
        driver = run.driver
        run.wait_until(lambda: not order.exists() or driver.poll() is not None, what=f"a {event} in {part}")
        run.struck = time.monotonic()
        if run.is_over():
            order.unlink(missing_ok=True)
            raise RunOverError
        (taken,) = run.orders.glob("taken-by-*")
        is_driver = taken.name == f"taken-by-{driver.pid}"
        taken.unlink()
        if is_driver:
            driver.wait()
            run.start()

    return act


def spoil_checkpoint(run: ChaosRun, draw: random.Random) -> None:
    """Kill the driver and damage the checkpoint that it would resume from."""
    _end_driver(run)
    run.left_behind()
    newest = run.newest_checkpoint()
    if newest is not None:
        file = draw.choice(sorted(path for path in newest.rglob("*") if path.is_file() and path.stat().st_size))
        content = bytearray(file.read_bytes())
        if draw.random() < 0.5:
            content = content[: draw.randrange(len(content))]
        else:
            content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        file.write_bytes(content)
    run.start()


def fill_disk(run: ChaosRun, draw: random.Random) -> None:
    """Fill the file system of the run until a write fails, and a little longer; start a single process again."""
    assert run.driver is not None
    driver, filler, printed = run.driver, run.disk / "filler", run.directory / "printed.txt"
    size_before = printed.stat().st_size
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as stream:
        while True:
            stream.write(bytes(4096))
    try:
        run.wait_until(
            lambda: b"could not" in printed.read_bytes()[size_before:] or driver.poll(),
            what="an error about the full disk",
        )
        time.sleep(draw.uniform(0, 3))
    finally:
        filler.unlink()
    if run.runtime == "local":
        driver.wait(SECONDS_TO_STOP)  # one process does not restart itself
        run.start()


def slow_disk(run: ChaosRun, draw: random.Random) -> None:
    """Slow down every fsync until a checkpoint is saved."""
    before = run.newest_checkpoint()
    order = _order(run, event="fsync", path=str(run.disk), when="before", act="sleep", seconds=draw.uniform(0.1, 0.6))
    try:
        run.wait_until(lambda: run.newest_checkpoint() != before or run.is_over(), what="a checkpoint on a slow disk")
    finally:
        order.unlink()


ON_NODES = (
    "SIGKILL a policy worker",
    "SIGKILL the driver",
    "SIGKILL a raylet",
    "SIGSTOP a policy worker",
    STUCK,
    "SIGKILL during the write of a checkpoint",
    "SIGKILL during the rename of a checkpoint",
    "truncated or bit-flipped checkpoint (and SIGKILL the driver)",
)
SEVERAL, RAY = ("torchrun", "ray"), ("ray",)
FAULTS = {
    "SIGKILL a policy worker": Fault(_signal(POLICY, signal.SIGKILL), runtimes=SEVERAL),
    "SIGKILL a reference worker": Fault(_signal(REFERENCE, signal.SIGKILL), modes=("concurrent",), runtimes=RAY),
    "SIGKILL the driver": Fault(kill_driver),
    "SIGTERM or SIGINT, and the same command again": Fault(stop_driver),
    "SIGKILL a raylet": Fault(kill_raylet, runtimes=RAY),
    "SIGSTOP a policy worker": Fault(_signal(POLICY, signal.SIGSTOP), runtimes=SEVERAL),
    "SIGSTOP a reference worker": Fault(_signal(REFERENCE, signal.SIGSTOP), modes=("concurrent",), runtimes=RAY),
    "SIGSTOP and SIGCONT of all processes": Fault(suspend, is_fatal=False),
    STUCK: Fault(stall_in_collective, runtimes=SEVERAL),
    "SIGKILL during the write of a checkpoint": Fault(_order_kill("fsync", "/checkpoints/.staging-")),
    "SIGKILL during the rename of a checkpoint": Fault(_order_kill("rename", "/checkpoints/step-")),
    "SIGKILL during precompute": Fault(_order_kill("rename", "/cache/"), modes=("precompute",), is_early=True),
    "SIGKILL during prepare": Fault(_order_kill("fsync", "/output/data/"), is_early=True),
    "ENOSPC": Fault(fill_disk),
    "truncated or bit-flipped checkpoint (and SIGKILL the driver)": Fault(spoil_checkpoint),
    "slow disk": Fault(slow_disk, is_fatal=False),
}
