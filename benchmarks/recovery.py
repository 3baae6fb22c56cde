"""Measure how long a run takes to recover from SIGKILL of a policy worker, and where the time goes.

    python benchmarks/recovery.py            # a table of the seconds of each phase
    python benchmarks/recovery.py --cold     # each time before the fork servers of the run are ready

A run trains a real model of 260 thousand parameters on two policy workers of a separate Ray instance. Just after a
checkpoint one of them is killed, again and again, once the run is prepared for a restart. Seconds are from the signal
to the first step that had not been made before. `detection` is measured here; the other phases are those of
logs/recoveries.jsonl, and `repeated steps` is the rest.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from chaos import MODEL, Case, disk, end, write_config, write_pairs
from chaos_run import ChaosRun

PHASES = (
    "detection",
    "stop",
    "verification",
    "wait",
    "processes",
    "import",
    "data",
    "rendezvous",
    "model",
    "checkpoint",
    "preparation",
    "first step",
    "repeated steps",
)
ENOUGH_STEPS, STEPS_BEFORE = 100_000, 20
SAVE_STEPS = 20


def recover(run: ChaosRun, draw: random.Random, num_before: int, *, is_cold: bool) -> dict[str, float]:
    """Kill a worker just after a checkpoint; return the seconds of each phase until the next new step."""
    start = run.step() + STEPS_BEFORE
    run.wait_until(lambda: run.step() >= start, what=f"step {start}")
    if not is_cold:
        run.wait_until(lambda: has_fork_server(run), what="a fork server")
    newest = run.newest_checkpoint()
    run.wait_until(lambda: run.newest_checkpoint() != newest, what="a checkpoint")
    before = run.step()
    killed = time.time()
    os.kill(draw.choice(run.workers("actor_train")), signal.SIGKILL)
    records = run.output / "logs" / "recoveries.jsonl"

    def has_recovered() -> bool:
        return len(read_lines(records)) > num_before and run.step() > before

    run.wait_until(has_recovered, what=f"a step after {before}")
    total, record = time.time() - killed, read_lines(records)[num_before]
    phases = {"detection": record["time"] - killed, **record["phases"]}
    return {**phases, "repeated steps": total - sum(phases.values()), "all": total}


def has_fork_server(run: ChaosRun) -> bool:
    """Return whether a process of the run serves forks: it has made the socket that its command names."""
    time.sleep(0.1)  # listing processes takes a while, too
    for pid in run.processes():
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
            if command[-3:-2] == ["serve"] and Path(command[-2]).exists():
                return True
    return False


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def measure(root: Path, kills: int, model: Path, *, is_cold: bool) -> list[dict[str, float]]:
    draw = random.Random(0)
    with disk(root, is_small=False):
        more = {"max_steps": ENOUGH_STEPS, "save_steps": SAVE_STEPS, "eval_steps": 0}
        config = write_config(root, Case("precompute", "dp", on_nodes=False), model, write_pairs(root), **more)
        run = ChaosRun(config, root)
        run.start()
        try:
            found = []
            for number in range(kills):
                found.append(recover(run, draw, number, is_cold=is_cold))
                print(f"  {found[-1]['all']:.1f} s", flush=True)
            return found
        finally:
            end(run)


def table(measured: list[dict[str, float]]) -> str:
    medians = {phase: statistics.median(each.get(phase, 0.0) for each in measured) for phase in (*PHASES, "all")}
    rows = [f"| {phase} | {seconds:.1f} |" for phase, seconds in medians.items()]
    totals = [each["all"] for each in measured]
    rows.append(f"| all, smallest to largest | {min(totals):.1f} to {max(totals):.1f} |")
    return "\n".join([f"| phase | seconds: median of {len(measured)} |", "|---|---:|", *rows])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--cold", action="store_true", help="do not wait for fork servers")
    parser.add_argument("--model", type=Path, default=MODEL)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="recovery-") as name:
        print(table(measure(Path(name), given.kills, given.model, is_cold=given.cold)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
