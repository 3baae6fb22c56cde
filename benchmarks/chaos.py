"""Inject faults into runs at random moments, and compare the results with an undisturbed run.

    python benchmarks/chaos.py --faults 52               # on two data-parallel workers of Ray
    python benchmarks/chaos.py --faults 6 --kinds ...    # a few of them, as the tests do
    python benchmarks/chaos.py --faults 27 --nodes --layouts tp pp cp --modes precompute  # across two Ray nodes
    python benchmarks/chaos.py --faults 80 --runtime torchrun --layouts dp replicas tp pp cp ep zero2 zero3
    python benchmarks/chaos.py --faults 40 --runtime local

Each run trains on two policy workers and a reference worker in a separate Ray session, on two ranks of torchrun, or in
one process, and gets a few faults one after the other. A killed driver is restarted with the same command; torchrun
restarts ranks. A run must finish; its log with all evaluations and every file of its last checkpoint must be bitwise
equal to those of the undisturbed run. No step may be logged twice, no more steps may be repeated than there are between
two checkpoints, and no process may be left behind.
With --nodes, the workers are on two Ray nodes of this machine; a killed raylet is a lost node, and another one joins.
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import yaml
from chaos_faults import FAULTS, ON_NODES, STUCK, Done, suffer
from chaos_nodes import Nodes, two_nodes
from chaos_run import DISK, ChaosRun, RunFailedError, RunOverError, hooked_environment

MODES = ("precompute", "concurrent")
# strategy_args of the two policy workers
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp": {},
    "replicas": {"strategy_config": {"dp_replicate": 2}},
    "tp": {"strategy_config": {"tp_size": 2}},
    "pp": {"strategy_config": {"pp_size": 2}},
    "cp": {"strategy_config": {"cp_size": 2}},
    "ep": {"strategy_config": {"ep_size": 2}},  # of a model with experts
    "zero2": {"strategy_name": "deepspeed_train", "strategy_config": {"zero_stage": 2}},
    "zero3": {"strategy_name": "deepspeed_train", "strategy_config": {"zero_stage": 3}},
}
RUNTIMES = ("local", "torchrun", "ray")
SAVE_STEPS = 5
HEARTBEAT_TIMEOUT = 20.0
# what the driver waits at most for stuck workers to write their stacks, before it reports them
SECONDS_TO_REPORT = 10.0
# steps before the next fault, so that recovery from the previous one is complete; no faults in the last steps
STEPS_BETWEEN, STEPS_AT_END = (1, 8), 3
SIZE_OF_DISK = "128m"
MODEL = Path(__file__).resolve().parents[2] / "shared" / "models" / "stories260K_hf"


@dataclass(frozen=True)
class Case:
    """What the runs of a comparison have in common."""

    mode: str
    layout: str
    on_nodes: bool
    runtime: str = "ray"

    def __str__(self) -> str:
        return f"{self.runtime}, {self.mode}, {self.layout}{' on two nodes' if self.on_nodes else ''}"

    @property
    def saves_behind(self) -> bool:
        """Whether runs save in the background."""
        return self.mode == "concurrent" or self.runtime == "local"

    def allows(self, kind: str) -> bool:
        return self.mode in FAULTS[kind].modes and self.runtime in FAULTS[kind].runtimes


def write_config(directory: Path, case: Case, model: Path, files: Sequence[Path], **more: Any) -> Path:
    data = {"template": "raw"}
    is_alone = case.runtime == "local"
    config = {
        "pretrain": str(with_experts(model, directory) if case.layout == "ep" else model),
        "runtime": case.runtime,
        "pref_loss": "sigmoid",
        "sequence_length": min(256, json.loads((model / "config.json").read_text())["max_position_embeddings"]),
        "save_steps": SAVE_STEPS,
        "eval_steps": 2 * SAVE_STEPS,
        "cache_dir": str(directory / DISK / "cache"),
        "track_with": [],
        **({} if is_alone else {"heartbeat_timeout": HEARTBEAT_TIMEOUT}),
        "async_save": case.saves_behind,
        "actor_train": {
            **({} if is_alone else {"num_workers": 2, "strategy_args": LAYOUTS[case.layout]}),
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
            "mode": case.mode,
            **({"num_workers": 1} if case.runtime == "ray" else {}),
            "infer_batch_size": 4,
        },
        "validation": {"data_args": {"file_name": str(files[1]), **data}},
        **more,
    }
    path = directory / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def with_experts(model: Path, directory: Path) -> Path:
    """Make a small random model with experts and the tokenizer of another model."""
    import torch
    from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

    path = directory.parent / "experts"
    if not path.exists():
        tokenizer = AutoTokenizer.from_pretrained(model)
        torch.manual_seed(0)
        sizes = {"hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 64, "num_hidden_layers": 3}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "max_position_embeddings": 512}
        config = Qwen3MoeConfig(vocab_size=len(tokenizer), **sizes, **heads, **experts)
        Qwen3MoeForCausalLM(config).save_pretrained(path)
        tokenizer.save_pretrained(path)
    return path


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


def undisturbed(config: Path, directory: Path, case: Case) -> dict[str, Any]:
    with nodes_of(case, directory) as nodes:
        run = ChaosRun(config, directory, case.runtime, nodes)
        run.start()
        run.wait_until(run.is_over, what="the end of the undisturbed run")
    return run.result()


@contextmanager
def nodes_of(case: Case, directory: Path) -> Iterator[Nodes | None]:
    if not case.on_nodes:
        yield None
        return
    with two_nodes(hooked_environment(directory)) as nodes:
        yield nodes


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
            detected = "" if done[-1].detected is None else f"noticed after {done[-1].detected:.1f} s, "
            print(f"  {kind}: {detected}{done[-1].seconds:.1f} s, {done[-1].repeated} steps repeated", flush=True)
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
        if (
            each.kind == STUCK
            and run.runtime == "ray"
            and not (each.detected and each.detected <= HEARTBEAT_TIMEOUT + SECONDS_TO_REPORT)
        ):
            wrong.append(f"stuck workers were noticed after {each.detected} s")
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


def draw_kinds(left: list[str], most: int) -> list[str]:
    """Remove up to `most` faults from `left`, and return them; only one of them is early."""
    chosen: list[str] = []
    for kind in list(left):
        is_second_early = FAULTS[kind].is_early and any(FAULTS[each].is_early for each in chosen)
        if len(chosen) < most and not is_second_early:
            chosen.append(kind)
            left.remove(kind)
    return chosen


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=52, help="total number of faults")
    parser.add_argument(
        "--kinds", nargs="+", choices=FAULTS, help="only these faults; ENOSPC needs permission to mount"
    )
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES, help="reference modes")
    parser.add_argument(
        "--layouts", nargs="+", choices=LAYOUTS, default=("dp",), help="meshes or engines of two workers"
    )
    parser.add_argument("--runtime", choices=RUNTIMES, default="ray")
    parser.add_argument("--nodes", action="store_true", help="two Ray nodes, with one worker each")
    parser.add_argument("--faults-per-run", type=int, default=5, help="maximum number of faults of a run")
    parser.add_argument("--steps", type=int, default=60, help="steps per run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--pairs", type=Path, nargs=2, metavar=("TRAIN", "VALIDATION"))
    given = parser.parse_args()
    if given.runtime != "ray":  # the reference is scored on the policy's mesh
        given.modes = ("precompute",)
    if never := [kind for kind in given.kinds or () if not any(case.allows(kind) for case in cases_of(given))]:
        parser.error(f"{never[0]!r} is not possible with {' or '.join(map(str, cases_of(given)))}")
    return given


def cases_of(given: argparse.Namespace) -> list[Case]:
    layouts = given.layouts if given.runtime != "local" else ("one process",)
    return [Case(mode, layout, given.nodes, given.runtime) for mode in given.modes for layout in layouts]


def draw_faults(given: argparse.Namespace, cases: Sequence[Case], draw: random.Random) -> dict[Case, list[str]]:
    """Distribute the faults over the cases, so that each kind meets as many of them as possible."""
    default = ON_NODES if given.nodes else FAULTS
    kinds = given.kinds or [kind for kind in default if any(case.allows(kind) for case in cases)]
    left: dict[Case, list[str]] = {case: [] for case in cases}
    numbers = dict.fromkeys(kinds, 0)
    for kind in itertools.islice(itertools.cycle(kinds), given.faults):
        possible = [case for case in cases if case.allows(kind)]
        left[possible[numbers[kind] % len(possible)]].append(kind)
        numbers[kind] += 1
    for each in left.values():
        draw.shuffle(each)
    return left


@dataclass
class Results:
    """The faults of all runs so far, and what was wrong."""

    done: list[Done] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def run_once(
    case: Case,
    directory: Path,
    config: Path,
    left: list[str],
    expected: dict[str, Any],
    results: Results,
    *,
    given: argparse.Namespace,
    draw: random.Random,
) -> None:
    """Make one run with the next faults of its case, and compare it with the undisturbed one."""
    chosen = draw_kinds(left, given.faults_per_run)
    with nodes_of(case, directory) as nodes:
        run = ChaosRun(config, directory, case.runtime, nodes)
        own, failure = disturbed(run, chosen, given.steps, draw)
        problems = [failure] if failure else check(run, expected, own, saves_behind=case.saves_behind)
        if failure:
            results.failed.append(failure.partition(":")[0])
            print((directory / "printed.txt").read_text()[-3000:])
            end(run)
    results.done += own
    if not own and not failure:
        problems.append("the run was over before its first fault; raise --steps")
    elif not failure:  # the run may have finished before some of its faults
        left += list((Counter(chosen) - Counter(each.kind for each in own)).elements())
    results.wrong += [f"{directory.name}, {case}, {', '.join(chosen)}: {problem}" for problem in problems]


def main() -> int:
    given = parse_arguments()
    draw, results, started = random.Random(given.seed), Results(), time.monotonic()
    cases = cases_of(given)
    left = draw_faults(given, cases, draw)
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        root = Path(name)
        files = given.pairs or write_pairs(root)

        def configured(directory: Path, case: Case) -> Path:
            return write_config(directory, case, given.model, files, max_steps=given.steps)

        expected = {}
        for number, case in enumerate(cases):
            directory = root / f"undisturbed-{number}"
            with disk(directory, is_small=False):
                expected[case] = undisturbed(configured(directory, case), directory, case)
        numbers = itertools.count()
        while any(left.values()):
            for case in (case for case in cases if left[case]):
                directory = root / f"run-{next(numbers)}"
                print(f"{directory.name}, {case}", flush=True)
                with disk(directory, is_small="ENOSPC" in left[case]):
                    config = configured(directory, case)
                    run_once(case, directory, config, left[case], expected[case], results, given=given, draw=draw)
    minutes, done, failed = (time.monotonic() - started) / 60, results.done, results.failed
    print(f"\n{len(done) + len(failed)} faults in {minutes:.0f} minutes\n\n{table(done, failed)}")
    print(
        "\n".join(["", *results.wrong]) if results.wrong else "\nevery run ended bitwise equal to the undisturbed one"
    )
    return int(bool(results.wrong))


if __name__ == "__main__":
    sys.exit(main())
