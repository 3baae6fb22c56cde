"""Soak test: memory, open files and threads of every process over thousands of steps.

python benchmarks/soak.py --steps 4000           # on Ray: the table of docs/internals/reliability-tests.md
python benchmarks/soak.py --place local          # in one process, the reference from the cache
A real run through the pipeline on the smallest real model, with saves, evaluations, trackers and the reference. Its
processes are sampled every few steps. Growth is the least-squares slope over the last three quarters of the run, as
warm-up is not a leak. The standard error assumes independent samples.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from pairs import polite_texts
from resident import has_title, kilobytes, titles

from thresher.config import parse_config
from thresher.pipeline import DPOPipeline

MODEL = Path(__file__).resolve().parents[2] / "shared" / "models" / "stories260K_hf"
PLACES: dict[str, dict[str, Any]] = {
    "ray": {"runtime": "ray", "reference": {"mode": "concurrent", "num_workers": 1}},
    "local": {"runtime": "local", "reference": {"mode": "precompute"}},
}
# process titles set by Ray, and the names in the table; a run has one of each
ROLES = {
    "ray::ActorWorker": "policy worker",
    "ray::ReferenceWorker": "reference worker",
    "raylet": "raylet",
    "gcs_server": "gcs",
}
# all resident pages; and private ones, which exclude files (code, maps) and shared memory (Ray's object store)
MEMORY = {"rss": "VmRSS", "own": "RssAnon"}
QUANTITIES = {"rss": "resident, MiB", "own": "private, MiB", "fds": "open files", "threads": "threads"}


@dataclass(frozen=True)
class Slope:
    """Growth per 1,000 steps, with its standard error."""

    per_1000_steps: float
    error: float

    def __str__(self) -> str:
        return f"{self.per_1000_steps:+.2f} ± {self.error:.2f}"


def slope(steps: Sequence[int], values: Sequence[float]) -> Slope:
    """Fit a line to the last three quarters of the samples."""
    first = len(steps) // 4
    x, y = np.asarray(steps[first:]) / 1000, np.asarray(values[first:], dtype=float)
    centred = x - x.mean()
    rise = float(centred @ (y - y.mean()) / (centred @ centred))
    residuals = y - y.mean() - rise * centred
    error = np.sqrt(residuals @ residuals / (len(x) - 2) / (centred @ centred))
    return Slope(rise, float(error))


@dataclass
class Watcher:
    """A console tracker that samples this process and its descendants every few steps."""

    every: int
    steps: list[int] = field(default_factory=list)
    seen: dict[str, list[dict[str, float]]] = field(default_factory=dict)
    each_step: Callable[[int], object] = lambda step: None
    name = "console"

    def start(self, run: object, resume_step: int | None) -> None:
        pass

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if "loss" not in metrics:
            return
        self.each_step(step)
        if step % self.every == 0:
            self.steps.append(step)
            for role, pid in processes().items():
                self.seen.setdefault(role, []).append(look_at(pid))

    def close(self, status: str) -> None:
        pass

    def values(self, role: str, quantity: str) -> list[float]:
        return [sample[quantity] for sample in self.seen[role]]

    def slope(self, role: str, quantity: str) -> Slope:
        return slope(self.steps, self.values(role, quantity))


def processes() -> dict[str, int]:
    """Return the processes of a run by role; this one is the driver."""
    found = {"driver": os.getpid()}
    for pid, title in titles(os.getpid()):
        for name, role in ROLES.items():
            if has_title(title, name):
                found[role] = pid
    return found


def look_at(pid: int) -> dict[str, float]:
    memory = {name: kilobytes(line, pid) / 1024 for name, line in MEMORY.items()}
    process = Path(f"/proc/{pid}")
    num_files, num_threads = (len(list((process / kind).iterdir())) for kind in ("fd", "task"))
    return memory | {"fds": num_files, "threads": num_threads}


def write_rows(directory: Path) -> tuple[Path, Path]:
    """Write real pairs for training, and 16 others for validation."""
    rows = [dict(zip(("prompt", "chosen", "rejected"), row, strict=True)) for row in polite_texts()]
    short = [row for row in rows if sum(map(len, row.values())) < 300 and row["chosen"] != row["rejected"]]
    files = directory / "train.jsonl", directory / "validation.jsonl"
    for path, part in zip(files, (short[16:], short[:16]), strict=True):
        path.write_text("".join(json.dumps(row) + "\n" for row in part))
    return files


def values_of_run(directory: Path, num_steps: int, place: Mapping[str, Any]) -> dict[str, Any]:
    train, validation = write_rows(directory)
    return {
        **place,
        "pretrain": str(MODEL),
        "output_dir": str(directory / "out"),
        "cache_dir": str(directory / "cache"),
        "max_steps": num_steps,
        "save_steps": max(10, num_steps // 40),
        "eval_steps": max(10, num_steps // 40),
        "sequence_length": 512,
        "track_with": ["console", "tensorboard"],
        "actor_train": {
            "model_args": {"dtype": "fp32"},
            "data_args": {"file_name": str(train), "template": "raw"},
            "training_args": {"learning_rate": 1e-5, "per_device_train_batch_size": 2},
        },
        "reference": place["reference"],
        "validation": {"data_args": {"file_name": str(validation), "template": "raw"}},
    }


def soak(values: Mapping[str, Any], watcher: Watcher) -> Watcher:
    """Run a config to its end, sampled by a watcher."""
    DPOPipeline(parse_config(dict(values)), console=watcher).run()  # type: ignore[arg-type]
    return watcher


def table(watcher: Watcher) -> str:
    lines = ["| process | quantity | first | last | growth per 1,000 steps |", "|---|---|---:|---:|---:|"]
    start = len(watcher.steps) // 4
    for role in watcher.seen:
        for quantity, label in QUANTITIES.items():
            values = watcher.values(role, quantity)[start:]
            digits = 1 if "MiB" in label else 0
            lines.append(
                f"| {role} | {label} | {values[0]:.{digits}f} | {values[-1]:.{digits}f} "
                f"| {watcher.slope(role, quantity)} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--every", type=int, default=20, help="steps between samples")
    parser.add_argument("--place", choices=PLACES, default="ray")
    parser.add_argument("--samples", type=Path, help="write every sample to this file")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as directory:
        values = values_of_run(Path(directory), arguments.steps, PLACES[arguments.place])
        watcher = soak(values, Watcher(arguments.every))
    print(f"\n{arguments.steps} steps in {time.perf_counter() - started:.0f} s\n\n{table(watcher)}")
    if arguments.samples is not None:
        arguments.samples.write_text(json.dumps({"steps": watcher.steps, "seen": watcher.seen}))


if __name__ == "__main__":
    main()
