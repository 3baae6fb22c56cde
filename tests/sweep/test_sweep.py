"""`thresher sweep`: a trial is the run of `thresher train`, ASHA stops the worse one, and a killed sweep resumes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.compared_runs import metric_log
from tests.support.processes import descendants
from tests.support.small_runs import assert_same_weights, make_base
from thresher.config import load_config
from thresher.pipeline import DPOPipeline

# CI runs trials without Ray (test_trial.py), and Tune without training (test_tune.py)
pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.hand]

RATE = "actor_train.training_args.learning_rate"
# the second rate changes next to nothing, so its loss is worse at the first evaluation
GRID = f"{RATE}=0.01,1e-06"
FAST, SLOW = "learning_rate=0.01", "learning_rate=1e-06"
NUM_STEPS, EVAL_STEPS = 300, 50  # long enough that a decision arrives before the end
OPTIONS = ("--scheduler", "asha", "--metric", "eval/loss", "--reduction-factor", "2")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sweep")
    path = directory / "dpo.yaml"
    length = {"max_steps": NUM_STEPS, "eval_steps": EVAL_STEPS, "save_steps": EVAL_STEPS}
    path.write_text(yaml.safe_dump(make_base(directory) | {"cache_dir": str(directory / "cache"), **length}))
    return path


def start(config: Path, output: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "thresher", "sweep", str(config), GRID, f"output_dir={output}", *OPTIONS]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(config: Path, output: Path) -> str:
    process = start(config, output)
    printed, _ = process.communicate(timeout=600)
    assert process.returncode == 0, printed
    return printed


def kill_when(config: Path, output: Path, happened: Callable[[], bool]) -> None:
    """Start the sweep and kill all its processes with SIGKILL, the trials among them, at a moment."""
    process = start(config, output)
    deadline = time.monotonic() + 600
    while not happened():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.01)
    pids = descendants(process.pid)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    process.wait()


def results(output: Path) -> list[dict[str, Any]]:
    trials = json.loads((output / "sweep.json").read_text())["trials"]
    return [{name: trial[name] for name in ("name", "values", "state", "step", "metrics")} for trial in trials]


@pytest.fixture(scope="module")
def undisturbed(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("undisturbed") / "runs"
    printed = finish(config, output)
    assert "stopped early" in printed
    return output


def test_a_trial_is_the_run_of_train_bitwise(config, undisturbed, tmp_path):
    DPOPipeline(load_config(config, [f"{RATE}=0.01", f"output_dir={tmp_path / 'train'}"])).run()
    assert metric_log(undisturbed / FAST) == metric_log(tmp_path / "train")
    assert_same_weights(undisturbed / FAST, tmp_path / "train")


def test_asha_stops_the_worse_trial_after_its_first_evaluation(undisturbed):
    fast, slow = results(undisturbed)
    assert (fast["state"], fast["step"]) == ("finished", NUM_STEPS)
    assert slow["state"] == "stopped early"
    assert EVAL_STEPS <= slow["step"] < NUM_STEPS
    assert max(path.name for path in (undisturbed / SLOW / "checkpoints").iterdir()).endswith(str(slow["step"]))
    assert (undisturbed / "report.html").read_text().startswith("<!doctype html>")


def test_a_killed_sweep_resumes_its_trials(config, undisturbed, tmp_path):
    output = tmp_path / "runs"
    kill_when(config, output, lambda: any((output / FAST / "checkpoints").glob(f"*{EVAL_STEPS}")))
    finish(config, output)
    assert results(output)[0] == results(undisturbed)[0]
    assert results(output)[1]["state"] == "stopped early"
    assert metric_log(output / FAST) == metric_log(undisturbed / FAST)
    assert_same_weights(output / FAST, undisturbed / FAST)
