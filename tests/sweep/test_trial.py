"""One trial's process: it is the run of `thresher train`, after a kill too, and a stop leaves a checkpoint. No Ray."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.support.compared_runs import metric_log
from tests.support.small_runs import assert_same_weights, make_base
from thresher.config import load_config
from thresher.pipeline import DPOPipeline
from thresher.sweep.results import TrialEnd, read_end
from thresher.sweep.trial import TrialProcess, TrialRequest

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("trial")
    values = make_base(directory) | {"cache_dir": str(directory / "cache"), "save_steps": 1}
    path = directory / "dpo.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


@pytest.fixture
def open_trial(config: Path, tmp_path: Path) -> Callable[..., TrialProcess]:
    def open_(name: str, *overrides: str) -> TrialProcess:
        directory = config.parent / name
        train = [sys.executable, "-m", "thresher", "train", str(config), f"output_dir={directory}"]
        return TrialProcess(
            TrialRequest(
                command=[*train, *overrides],
                environment=os.environ,
                working_dir=tmp_path,
                directory=directory,
                log=directory / "logs" / "metrics.jsonl",
                metric="eval/loss",
                interrupt_file=tmp_path / "interrupt",
            )
        )

    return open_


def test_a_killed_trial_resumes_and_is_the_run_of_train_bitwise(config, open_trial, tmp_path):
    DPOPipeline(load_config(config, [f"output_dir={tmp_path / 'trained'}"])).run()
    expected = [
        {"step": each["step"], "value": each["eval/loss"]}
        for each in metric_log(tmp_path / "trained")
        if "eval/loss" in each
    ]
    directory = config.parent / "killed"
    first = open_trial("killed")
    assert first.next_result() == expected[0]
    first._process.kill()
    first._process.wait()
    while not first.next_result().get("done"):
        pass
    # a run this small may have been complete
    assert read_end(directory) in (TrialEnd("failed", "exit code -9; see output.log"), TrialEnd("finished"))
    again = open_trial("killed")
    results = [again.next_result() for _ in expected]
    assert results == expected
    assert again.next_result() == {**expected[-1], "done": True}
    assert read_end(directory) == TrialEnd("finished")
    assert metric_log(directory) == metric_log(tmp_path / "trained")
    assert_same_weights(directory, tmp_path / "trained")
    # a trial that has ended reports its log, and starts no process
    replayed = open_trial("killed")
    assert [replayed.next_result() for _ in expected] == expected
    assert replayed._process is None


def test_a_stopped_trial_saves_its_last_step(config, open_trial):
    trial = open_trial("stopped", "max_steps=2000")
    assert trial.next_result()["step"] == 2
    trial.stop()
    directory = config.parent / "stopped"
    assert read_end(directory) == TrialEnd("stopped early")
    step = metric_log(directory)[-1]["step"]
    assert step < 2000
    assert max(path.name for path in (directory / "checkpoints").iterdir()).endswith(str(step))


def test_a_user_error_is_the_message_of_a_failed_trial(config, open_trial):
    assert open_trial("failed", "pretrain=nowhere").next_result()["done"]
    end = read_end(config.parent / "failed")
    assert end.state == "failed"
    assert "nowhere" in end.message
