"""A run under test: its processes, its progress and its result."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from chaos_nodes import Nodes
from resident import has_title, titles

DISK = "disk"
HOOK = Path(__file__).resolve().parent / "chaos_hook"
# metrics that depend on the clock or the process, and not on the numbers of a run
NOT_REPEATABLE = ("time/", "memory/", "pairs_per_second", "useful_tokens_per_second")
WORKERS = ("ray::ActorWorker", "ray::ReferenceWorker")
# torchrun looks at its ranks every tenth of a second; it restarts all of them as often as they fail
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=100"]
TORCHRUN += ["--monitor-interval=0.1"]
SECONDS_TO_RECOVER = 240.0
SECONDS_TO_EXIT = 60.0


class RunFailedError(Exception):
    """The run did not recover from a fault."""


class RunOverError(Exception):
    """The run finished before a fault could be injected."""


class Process(NamedTuple):
    """A process; started: in clock ticks."""

    pid: int
    started: int


@dataclass
class ChaosRun:
    """`thresher train` in separate processes; code that kills the driver restarts it with the same command.

    runtime: local, where the driver is the only process; torchrun, which starts failed ranks again by itself; or ray.
    nodes: the nodes that workers of Ray run on; without them, the driver starts Ray.
    """

    config: Path
    directory: Path
    runtime: str = "ray"
    nodes: Nodes | None = None
    driver: subprocess.Popen[bytes] | None = None
    highest: int = 0
    repeated: int = 0
    struck: float = 0.0
    started: dict[Process, str] = field(default_factory=dict)

    @property
    def disk(self) -> Path:
        """Directory that the run writes to; it may be a separate file system."""
        return self.directory / DISK

    @property
    def output(self) -> Path:
        return self.disk / "output"

    @property
    def orders(self) -> Path:
        return orders_of(self.directory)

    def start(self) -> None:
        self.orders.mkdir(exist_ok=True)
        environment = os.environ | hooked_environment(self.directory)
        address = [] if self.nodes is None else [f"ray_address={self.nodes.address}"]
        launcher = TORCHRUN if self.runtime == "torchrun" else []
        train = ["-m", "thresher", "train", str(self.config), f"output_dir={self.output}", *address]
        with (self.directory / "printed.txt").open("ab") as printed:
            self.driver = subprocess.Popen(
                [sys.executable, *launcher, *train],
                env=environment,
                stdout=printed,
                stderr=subprocess.STDOUT,
            )

    def processes(self, title: str = "") -> list[int]:
        """Return the live processes of the run with this title."""
        assert self.driver is not None
        found = []
        # nodes are children of this process
        for pid, own in titles(self.driver.pid if self.nodes is None else os.getpid()):
            if (started := _start_time(pid)) is not None:
                self.started[Process(pid, started)] = own
            if has_title(own, title):
                found.append(pid)
        return found

    def workers(self, role: str) -> list[int]:
        """Return the live workers of a role: the ranks of torchrun, or those of Ray as their logs name them."""
        if self.runtime != "ray":
            return [pid for pid in self.processes() if "LOCAL_RANK" in environment_of(pid)]
        alive = set(self.processes("ray::"))
        logs = sorted((self.output / "logs" / "workers").glob(f"{role}-[0-9]*.log"))
        named = [re.findall(r"worker \d+ of \d+, process (\d+) on ", log.read_text()) for log in logs]
        return [int(pids[-1]) for pids in named if pids and int(pids[-1]) in alive]

    def left_behind(self) -> dict[int, str]:
        """Return the processes that the run started and that outlived it, with their titles."""
        deadline = time.monotonic() + SECONDS_TO_EXIT
        while True:
            # a later process can get the same pid
            alive = {each.pid: title for each, title in self.started.items() if _start_time(each.pid) == each.started}
            if self.nodes is not None:  # which outlive the run, with idle processes
                alive = {pid: title for pid, title in titles(os.getpid()) if pid in alive and title.startswith(WORKERS)}
            if not alive or time.monotonic() > deadline:
                return alive
            time.sleep(0.2)

    def step(self) -> int:
        """Return the last logged step; steps that disappear from the log count as repeated."""
        records = self.records()
        last = int(records[-1]["step"]) if records else 0
        if last < self.highest:
            self.repeated = max(self.repeated, self.highest - last)
        self.highest = max(self.highest, last)
        return last

    def log_file(self) -> int | None:
        """Return the inode of the log; None if it does not exist yet."""
        try:
            return (self.output / "logs" / "metrics.jsonl").stat().st_ino
        except FileNotFoundError:
            return None

    def records(self) -> list[dict[str, Any]]:
        try:
            lines = (self.output / "logs" / "metrics.jsonl").read_bytes().split(b"\n")[:-1]
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in lines]

    def last_failure(self) -> float | None:
        """Return when the run last noticed a failure, in seconds since the epoch."""
        try:
            lines = (self.output / "logs" / "recoveries.jsonl").read_text().splitlines()
        except FileNotFoundError:
            return None
        return float(json.loads(lines[-1])["time"])

    def wait_until(self, reached: Callable[[], object], *, what: str) -> None:
        """Wait; raise RunFailedError if the run fails or takes too long, RunOverError if it finishes."""
        deadline = time.monotonic() + SECONDS_TO_RECOVER
        while not reached():
            assert self.driver is not None
            if self.driver.poll() not in (None, 0) and not reached():
                raise RunFailedError(
                    f"exited with {self.driver.returncode} while waiting for {what}; see {self.directory}"
                )
            if self.driver.poll() == 0 and not reached():
                raise RunOverError
            if time.monotonic() > deadline:
                raise RunFailedError(f"did not reach {what} within {SECONDS_TO_RECOVER:.0f} s; see {self.directory}")
            self.step()
            time.sleep(0.01)

    def is_over(self) -> bool:
        assert self.driver is not None
        return self.driver.poll() == 0

    def newest_checkpoint(self) -> Path | None:
        return max((self.output / "checkpoints").glob("step-*"), default=None)

    def result(self) -> dict[str, Any]:
        """Return what must be bitwise equal: the log with all evaluations, and every file of the last checkpoint."""
        records = [
            {name: value for name, value in record.items() if not name.startswith(NOT_REPEATABLE)}
            for record in self.records()
        ]
        newest = self.newest_checkpoint()
        assert newest is not None
        files = {
            str(path.relative_to(newest)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(newest.rglob("*"))
            if path.is_file() and path.name not in ("config.json", "manifest.json")  # both contain paths
        }
        return {"log": records, "checkpoint": newest.name, "files": files}


def environment_of(pid: int) -> set[str]:
    """Return the names of the variables that a process was started with; none if it has exited."""
    try:
        content = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return set()
    return {each.partition(b"=")[0].decode(errors="replace") for each in content.split(b"\0")}


def orders_of(directory: Path) -> Path:
    return directory / "orders"


def hooked_environment(directory: Path) -> dict[str, str]:
    """Return the variables of processes that obey the orders of a run."""
    paths = [str(HOOK), *(each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each != str(HOOK))]
    return {"CHAOS_ORDERS": str(orders_of(directory)), "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def _start_time(pid: int) -> int | None:
    """Return when a process started, in clock ticks; None if it has exited."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] == "Z" else int(fields[19])
