"""Measure how long a run takes to recover from SIGKILL of a policy worker, and where the time goes.

    python benchmarks/recovery.py            # a table of the seconds of each phase

A run trains a real model of 260 thousand parameters on two policy workers of a separate Ray instance. Just after a
checkpoint one of them is killed, again and again: without spare workers, and with them. Seconds are from the signal to
the first step that had not been made before. `detection` is measured here; the other phases are those of
logs/recoveries.jsonl, and `repeated steps` is the rest.
"""

from __future__ import annotations

import argparse
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

from chaos import MODEL, disk, end, write_config, write_pairs
from chaos_run import ChaosRun
from resident import kilobytes

SPARES = (0, 1)
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


def recover(run: ChaosRun, draw: random.Random, num_before: int, *, has_spares: bool) -> dict[str, float]:
    """Kill a worker just after a checkpoint; return the seconds of each phase until the next new step."""
    log = run.output / "logs" / "run.log"
    start = run.step() + STEPS_BEFORE
    run.wait_until(lambda: run.step() >= start, what=f"step {start}")
    if has_spares:
        ready = "spare workers are ready"
        run.wait_until(lambda: log.read_text().count(ready) > num_before, what="spare workers")
        if num_before == 0:
            print(describe_spares(run))
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


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def private_megabytes(pid: int) -> float:
    """Memory that the process does not share with others: what ending it would free."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / 1024


def describe_spares(run: ChaosRun) -> str:
    workers = set(run.workers("actor_train"))
    spares = [pid for pid in run.processes("ray::ActorWorker") if pid not in workers]
    resident, private = (
        statistics.mean(values)
        for values in ([kilobytes("VmRSS", pid) / 1024 for pid in spares], [private_megabytes(pid) for pid in spares])
    )
    return f"a spare has {resident:.0f} MiB resident, {private:.0f} MiB of them private ({len(spares)} spares)"


def measure(root: Path, spares: int, kills: int, model: Path, draw: random.Random) -> list[dict[str, float]]:
    directory = root / f"spares-{spares}"
    with disk(directory, is_small=False):
        more = {"max_steps": ENOUGH_STEPS, "save_steps": SAVE_STEPS, "eval_steps": 0, "spare_workers": spares}
        config = write_config(directory, "precompute", model, write_pairs(root), **more)
        run = ChaosRun(config, directory)
        run.start()
        try:
            found = []
            for number in range(kills):
                found.append(recover(run, draw, number, has_spares=bool(spares)))
                print(f"  {spares} spares: {found[-1]['all']:.1f} s", flush=True)
            return found
        finally:
            end(run)


def table(measured: dict[int, list[dict[str, float]]]) -> str:
    lines = [f"| seconds: median of {len(measured[SPARES[0]])} | without spares | with spares |", "|---|---:|---:|"]
    for phase in (*PHASES, "all"):
        medians = [statistics.median(each.get(phase, 0.0) for each in measured[spares]) for spares in SPARES]
        lines.append(f"| {phase} | {' | '.join(f'{value:.1f}' for value in medians)} |")
    ranges = [[each["all"] for each in measured[spares]] for spares in SPARES]
    lines.append(f"| all, smallest to largest | {' | '.join(f'{min(a):.1f} to {max(a):.1f}' for a in ranges)} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=3, help="per number of spares")
    parser.add_argument("--model", type=Path, default=MODEL)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="recovery-") as name:
        measured = {
            spares: measure(Path(name), spares, given.kills, given.model, random.Random(0)) for spares in SPARES
        }
    print(table(measured))
    return 0


if __name__ == "__main__":
    sys.exit(main())
