"""Sweeps on Ray Tune: a trial is the run of `thresher train`, and a killed sweep ends like an undisturbed one."""

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

# CI runs trials and the order of their reports without Ray (test_trial_run.py, test_turns.py)
pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.hand]

RATE = "actor_train.training_args.learning_rate"
# the second rate changes next to nothing, so that its loss is worse at the first evaluation
GRID = f"{RATE}=0.01,1e-06"
FAST, SLOW = "learning_rate=0.01", "learning_rate=1e-06"
OPTIONS = ("--scheduler", "asha", "--metric", "eval/loss", "--reduction-factor", "2")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sweep")
    path = directory / "dpo.yaml"
    path.write_text(yaml.safe_dump(make_base(directory) | {"cache_dir": str(directory / "cache"), "save_steps": 1}))
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


def test_asha_stops_the_worse_trial_one_step_after_its_first_evaluation(undisturbed):
    fast, slow = results(undisturbed)
    assert (fast["state"], fast["step"]) == ("finished", 4)
    assert (slow["state"], slow["step"]) == ("stopped early", 3)
    assert max(path.name for path in (undisturbed / SLOW / "checkpoints").iterdir()).endswith("3")
    assert (undisturbed / "report.html").read_text().startswith("<!doctype html>")


@pytest.mark.parametrize("kills", [1, 2])
def test_a_killed_sweep_ends_with_the_results_of_an_undisturbed_one(config, undisturbed, tmp_path, kills):
    output = tmp_path / "runs"
    moments = [
        lambda: any((output / FAST / "checkpoints").glob("*2")),
        lambda: any((output / SLOW / "checkpoints").glob("*1")),
    ]
    for moment in moments[2 - kills :]:
        kill_when(config, output, moment)
    finish(config, output)
    assert results(output) == results(undisturbed)
    for name in (FAST, SLOW):
        assert metric_log(output / name) == metric_log(undisturbed / name)
        assert_same_weights(output / name, undisturbed / name)
