"""Inject faults into runs at random moments, and compare the results with an undisturbed run.

    python benchmarks/chaos.py --faults 52               # the table of docs/guides/reliability-tests.md
    python benchmarks/chaos.py --faults 6 --kinds ...    # a few of them, as the tests do

Each run trains on two policy workers and a reference worker in a separate Ray session, and gets a few faults one after
the other. A killed driver is restarted with the same command. A run must finish; its log with all evaluations and every
file of its last checkpoint must be bitwise equal to those of the undisturbed run. No step may be logged twice, no more
steps may be repeated than there are between two checkpoints, and no process may be left behind.
If a run gets ENOSPC, its directory is a small separate file system; that needs permission to mount.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import yaml
from chaos_faults import FAULTS, Done, suffer
from chaos_run import DISK, ChaosRun, RunFailedError, RunOverError

MODES = ("precompute", "concurrent")
SAVE_STEPS = 5
FAULTS_PER_RUN = 5
# steps before the next fault, so that recovery from the previous one is complete; no faults in the last steps
STEPS_BETWEEN, STEPS_AT_END = (1, 8), 3
SIZE_OF_DISK = "128m"
MODEL = Path(__file__).resolve().parents[2] / "shared" / "models" / "stories260K_hf"


def write_config(directory: Path, mode: str, model: Path, files: Sequence[Path], **more: Any) -> Path:
    data = {"template": "raw"}
    config = {
        "pretrain": str(model),
        "runtime": "ray",
        "pref_loss": "sigmoid",
        "sequence_length": min(256, json.loads((model / "config.json").read_text())["max_position_embeddings"]),
        "save_steps": SAVE_STEPS,
        "eval_steps": 2 * SAVE_STEPS,
        "cache_dir": str(directory / DISK / "cache"),
        "track_with": [],
        "heartbeat_timeout": 16,
        "async_save": saves_behind(mode),
        "actor_train": {
            "num_workers": 2,
            "model_args": {"dtype": "fp32"},
            "data_args": {"file_name": str(files[0]), **data},
            "training_args": {
                "learning_rate": 1e-3,
                "global_batch_size": 16,
                "per_device_train_batch_size": 2,
                "lr_scheduler_type": "cosine",
            },
        },
        "reference": {
            "mode": mode,
            "num_workers": 1,
            "infer_batch_size": 4,
        },
        "validation": {"data_args": {"file_name": str(files[1]), **data}},
        **more,
    }
    path = directory / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def saves_behind(mode: str) -> bool:
    """Return whether runs of this mode save in the background; one of the modes does."""
    return mode == "concurrent"


def write_pairs(directory: Path) -> list[Path]:
    from pairs import polite_texts

    texts = polite_texts()
    paths = []
    for name, part in (("train", texts[:300]), ("validation", texts[300:330])):
        rows = [dict(zip(("prompt", "chosen", "rejected"), text, strict=True)) for text in part]
        paths.append(directory / f"{name}.jsonl")
        paths[-1].write_text("".join(json.dumps(row) + "\n" for row in rows))
    return paths


@contextmanager
def disk(directory: Path, *, is_small: bool) -> Iterator[None]:
    """Create the directory that a run writes to; with is_small, on a separate file system of limited size."""
    place = directory / DISK
    place.mkdir(parents=True)
    if not is_small:
        yield
        return
    subprocess.run(["/bin/mount", "-t", "tmpfs", "-o", f"size={SIZE_OF_DISK}", "tmpfs", str(place)], check=True)
    try:
        yield
    finally:
        subprocess.run(["/bin/umount", "--lazy", str(place)], check=True)


def undisturbed(config: Path, directory: Path) -> dict[str, Any]:
    run = ChaosRun(config, directory)
    run.start()
    run.wait_until(run.is_over, what="the end of the undisturbed run")
    return run.result()


def disturbed(
    run: ChaosRun, kinds: Sequence[str], num_steps: int, draw: random.Random
) -> tuple[list[Done], str | None]:
    """Inject faults one after the other and wait for the end; return the faults and, if the run failed, the reason."""
    done: list[Done] = []
    kind = "nothing"
    try:
        for kind in sorted(kinds, key=lambda kind: not FAULTS[kind].is_early):
            if not FAULTS[kind].is_early:
                target = run.step() + draw.randint(*STEPS_BETWEEN)
                if target > num_steps - STEPS_AT_END:
                    break
                if run.driver is None:
                    run.start()
                run.wait_until(lambda target=target: run.step() >= target, what=f"step {target}")
            done.append(suffer(run, kind, draw))
            print(f"  {kind}: {done[-1].seconds:.0f} s, {done[-1].repeated} steps repeated", flush=True)
        run.wait_until(run.is_over, what="the end")
    except RunFailedError as error:
        return done, f"{kind}: the run {error}"
    except RunOverError:
        pass
    return done, None


def check(run: ChaosRun, expected: dict[str, Any], done: Sequence[Done], *, saves_behind: bool) -> list[str]:
    """List what is wrong with a finished run."""
    result, wrong = run.result(), []
    steps = [record["step"] for record in result["log"] if "loss" in record]
    if steps != sorted(set(steps)):
        wrong.append("a step is logged twice")
    wrong += [f"{part} differs from the undisturbed run" for part in expected if result[part] != expected[part]]
    for each in done:
        # a checkpoint that is damaged, or still being written, costs the steps since the previous one
        limit = SAVE_STEPS * (2 if "bit-flipped" in each.kind or saves_behind else 1)
        if each.repeated > limit:
            wrong.append(f"{each.repeated} steps were repeated after {each.kind}")
    if left := run.left_behind():
        wrong.append(f"processes were left behind: {left}")
        end(run)
    return wrong


def end(run: ChaosRun) -> None:
    if run.driver is not None and run.driver.poll() is None:
        run.processes()
        run.driver.kill()
        run.driver.wait()
    for pid in run.left_behind():
        os.kill(pid, 9)


def table(done: Sequence[Done], failed: Sequence[str]) -> str:
    lines = [
        "| fault | count | recovered | seconds to recover: median (max) | steps repeated: median (max) |",
        "|---|---:|---:|---:|---:|",
    ]
    for kind in FAULTS:
        own, lost = [each for each in done if each.kind == kind], sum(1 for each in failed if each == kind)
        if own or lost:
            seconds, repeated = [each.seconds for each in own] or [0.0], [each.repeated for each in own] or [0]
            lines.append(
                f"| {kind} | {len(own) + lost} | {len(own)} | {statistics.median(seconds):.0f} ({max(seconds):.0f}) | "
                f"{statistics.median(repeated):g} ({max(repeated)}) |"
            )
    lines.append(f"| all | {len(done) + len(failed)} | {len(done)} | | |")
    return "\n".join(lines)


def draw_kinds(left: list[str], mode: str, most: int) -> list[str]:
    """Remove up to `most` faults from `left` that are possible in this reference mode, and return them."""
    chosen: list[str] = []
    for kind in list(left):
        is_second_early = FAULTS[kind].is_early and any(FAULTS[each].is_early for each in chosen)
        if len(chosen) < most and mode in FAULTS[kind].modes and not is_second_early:
            chosen.append(kind)
            left.remove(kind)
    return chosen


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=52, help="total number of faults")
    parser.add_argument(
        "--kinds", nargs="+", choices=FAULTS, help="only these faults; ENOSPC needs permission to mount"
    )
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES, help="reference modes")
    parser.add_argument("--steps", type=int, default=60, help="steps per run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--pairs", type=Path, nargs=2, metavar=("TRAIN", "VALIDATION"))
    given = parser.parse_args()
    if never := [kind for kind in given.kinds or () if not set(FAULTS[kind].modes) & set(given.modes)]:
        parser.error(f"{never[0]!r} is not possible with reference mode {' or '.join(given.modes)}")
    draw = random.Random(given.seed)
    kinds = given.kinds or [kind for kind in FAULTS if set(FAULTS[kind].modes) & set(given.modes)]
    left = list(itertools.islice(itertools.cycle(kinds), given.faults))
    draw.shuffle(left)
    done: list[Done] = []
    failed: list[str] = []
    wrong: list[str] = []
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        root = Path(name)
        files = given.pairs or write_pairs(root)
        expected = {}
        for mode in given.modes:
            with disk(root / mode, is_small=False):
                expected[mode] = undisturbed(
                    write_config(root / mode, mode, given.model, files, max_steps=given.steps), root / mode
                )
        for number, mode in enumerate(itertools.cycle(given.modes)):
            if not left:
                break
            directory = root / f"run-{number}"
            chosen = draw_kinds(left, mode, FAULTS_PER_RUN)
            if not chosen:
                continue
            with disk(directory, is_small="ENOSPC" in chosen):
                run = ChaosRun(write_config(directory, mode, given.model, files, max_steps=given.steps), directory)
                print(f"run {number}, {mode}", flush=True)
                own, failure = disturbed(run, chosen, given.steps, draw)
                problems = [failure] if failure else check(run, expected[mode], own, saves_behind=saves_behind(mode))
                if failure:
                    failed.append(failure.partition(":")[0])
                    print((directory / "printed.txt").read_text()[-3000:])
                    end(run)
            done += own
            if not failure:
                left += list(
                    (Counter(chosen) - Counter(each.kind for each in own)).elements()
                )  # the run finished first
            wrong += [f"run {number}, {mode}, {', '.join(chosen)}: {problem}" for problem in problems]
    minutes = (time.monotonic() - started) / 60
    print(f"\n{len(done) + len(failed)} faults in {minutes:.0f} minutes\n\n{table(done, failed)}")
    print("\n".join(["", *wrong]) if wrong else "\nevery run ended bitwise equal to the undisturbed one")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
