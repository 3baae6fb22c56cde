"""Parts of several processes: bandwidth of collectives, parity with one process, a killed rank, a rank that hangs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

from benchmarks.acceptance.report import Facts, Place, Skipped, check
from tests.support.compared_runs import merge, metric_log
from tests.support.paths import ROOT
from tests.support.small_runs import assert_same_run, assert_same_weights, make_base

_TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"]
_SECONDS = 600
_HANG_SECONDS = 15

COMPILED = {"training_args": {"torch_compile": True}}
CASES_ON_CPU: dict[str, dict[str, Any]] = {"shards": {}, "compiled": COMPILED}
CASES_ON_GPUS: dict[str, dict[str, Any]] = {
    **CASES_ON_CPU,
    "replicas": {"strategy_args": {"strategy_config": {"dp_replicate": 2}}},
    "tensor parallel": {"strategy_args": {"strategy_config": {"tp_size": 2}}},
    "pipeline": {"strategy_args": {"strategy_config": {"pp_size": 2}}},
    "context parallel": {"strategy_args": {"strategy_config": {"cp_size": 2}}},
    "cpu offload": {"strategy_args": {"strategy_config": {"cpu_offload": True}}},
    "compiled tensor parallel": {**COMPILED, "strategy_args": {"strategy_config": {"tp_size": 2}}},
    "compiled pipeline": {**COMPILED, "strategy_args": {"strategy_config": {"pp_size": 2}}},
    "compiled context parallel": {**COMPILED, "strategy_args": {"strategy_config": {"cp_size": 2}}},
    "compiled, all recomputed": {"training_args": {"torch_compile": True, "gradient_checkpointing": "full"}},
}


def collectives(place: Place) -> Facts:
    """Gigabytes per second of an all-reduce and an all-gather between two ranks, with the sums checked."""
    _needs_two(place)
    done = _launch(place, "benchmarks.acceptance.collectives", place.device)
    check(done.returncode == 0, done.stderr[-2000:])
    facts: Facts = json.loads(done.stdout.splitlines()[-1])
    return facts


def parity(place: Place) -> Facts:
    """Two ranks log the numbers and reach the weights of one process, in fp32 to 1e-5."""
    _needs_two(place)
    one = _train(place, "one process", {}, num_ranks=1)
    passed, failed = [], {}
    for name, changes in (CASES_ON_CPU if place.device == "cpu" else CASES_ON_GPUS).items():
        try:
            assert_same_run(_train(place, name, changes), one)
            passed.append(name)
        except AssertionError as error:
            failed[name] = str(error)[-1000:]
    check(not failed, f"these differ from one process: {failed}")
    return {"cases": passed, "tolerance": 1e-5}


def failure(place: Place) -> Facts:
    """SIGKILL of a rank in step 3; the same command resumes, and ends with the bits of an undisturbed run."""
    _needs_two(place)
    undisturbed = place.directory / "shards"
    if not undisturbed.exists():
        _train(place, "shards", {})
    config = _write(place, "killed", {"async_save": False})
    done = _launch(place, "tests.support.launched", "1:kill:3", "train", str(config))
    check(done.returncode != 0, "the run survived the death of a rank")
    done = _launch(place, "thresher", "train", str(config))
    check(done.returncode == 0, done.stderr[-2000:])
    check("resuming from" in done.stderr, "the second start did not resume")
    check(metric_log(place.directory / "killed") == metric_log(undisturbed), "the logged numbers differ")
    assert_same_weights(place.directory / "killed", undisturbed)
    return {"bitwise": True}


def stall(place: Place) -> Facts:
    """A rank that never enters the collectives of step 3 ends the run within the timeout, instead of 30 minutes."""
    _needs_two(place)
    config = _write(place, "hung", {"heartbeat_timeout": _HANG_SECONDS, "runtime": "torchrun"})
    started = time.perf_counter()
    done = _launch(place, "tests.support.launched", "1:hang:3", "train", str(config))
    seconds = time.perf_counter() - started
    check(done.returncode != 0, "the run did not end with an error")
    if place.device == "cpu":  # on GPUs, NCCL may end the process first
        check("another rank hangs" in done.stderr, done.stderr[-2000:])
    dumps = list((place.directory / "hung" / "logs" / "workers").glob("actor_train-nccl-*"))
    return {"heartbeat_timeout": _HANG_SECONDS, "seconds_with_start_up": round(seconds, 1), "dumps": len(dumps)}


def ray(place: Place) -> Facts:
    """Two Ray workers log the numbers of one process, each on a device of its own, and write their logs."""
    _needs_two(place)
    one = place.directory / "one process"
    if not one.exists():
        _train(place, "one process", {}, num_ranks=1)
    where = {"num_workers": 2} if place.device == "cpu" else {"device_mapping": [0, 1]}
    config = _write(place, "on Ray", {"runtime": "ray", "actor_train": where})
    done = _run(place, [sys.executable, "-m", "thresher", "train", str(config)])
    check(done.returncode == 0, done.stderr[-2000:])
    assert_same_run(config.with_suffix(""), one)
    logs = [(config.with_suffix("") / "logs" / "workers" / f"actor_train-{rank}.log").read_text() for rank in (0, 1)]
    devices = [re.findall(r"device: (.+)", log)[0] for log in logs]
    # each worker sees one GPU, as number 0
    check(devices == ["cpu" if place.device == "cpu" else "cuda:0"] * 2, f"the workers have the devices {devices}")
    addresses = [re.findall(r"GPU: (.+)", log) for log in logs]
    check(place.device == "cpu" or addresses[0] != addresses[1], f"both workers have the GPU {addresses[0]}")
    return {"devices": devices, "addresses": addresses}


def _needs_two(place: Place) -> None:
    if place.num_devices < 2:
        raise Skipped("it needs two GPUs, and this machine has one")


def _train(place: Place, name: str, actor_train: dict[str, Any], num_ranks: int = 2) -> Path:
    config = _write(place, name, {"actor_train": actor_train})
    command = ("thresher", "train", str(config))
    done = _launch(place, *command) if num_ranks > 1 else _run(place, [sys.executable, "-m", *command])
    check(done.returncode == 0, f"{name}: {done.stderr[-2000:]}")
    return config.with_suffix("")


def _write(place: Place, name: str, changes: dict[str, Any]) -> Path:
    """Write the config of a run of four steps; its output directory has the same name. Models and pairs are shared."""
    inputs = place.directory / "inputs"
    if not inputs.exists():
        inputs.mkdir(parents=True)
        (inputs / "base.yaml").write_text(yaml.safe_dump(make_base(inputs)))
    base = yaml.safe_load((inputs / "base.yaml").read_text())
    same_model = {"reference": {"model_args": {"model_name_or_path": None}}}  # on the policy's axes
    output = place.directory / name
    own = {"output_dir": str(output), "cache_dir": f"{output}-cache"}
    path = output.with_suffix(".yaml")
    path.write_text(yaml.safe_dump(merge(merge(merge(base, same_model), own), changes)))
    return path


def _launch(place: Place, *arguments: str) -> subprocess.CompletedProcess[str]:
    return _run(place, [*_TORCHRUN, *arguments])


def _run(place: Place, command: list[str]) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # one order of sums, so that reruns are bitwise equal
    }
    if place.device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    paths = [str(ROOT), str(ROOT / "src"), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=_SECONDS, check=False
    )
