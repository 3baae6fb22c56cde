"""One trial in its process: its records, a stop after a decision, and what a kill leaves. No Ray."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.support.compared_runs import metric_log
from tests.support.small_runs import assert_same_weights, make_base
from thresher.config import load_config
from thresher.pipeline import DPOPipeline
from thresher.sweep.process import TrialRequest, TrialRun
from thresher.sweep.trial_end import TrialEnd, read_end

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("trial")
    values = make_base(directory) | {
        "cache_dir": str(directory / "cache"),
        "output_dir": str(directory),
        "save_steps": 1,
    }
    path = directory / "dpo.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


@pytest.fixture
def open_trial(config: Path, tmp_path: Path) -> Callable[[str], TrialRun]:
    def open_(name: str) -> TrialRun:
        request = TrialRequest(
            config=str(config),
            name=name,
            overrides=("beta=0.2",),
            directory=config.parent / name,
            log_dir=config.parent / name / "logs",
            working_dir=tmp_path,
            metric="eval/loss",
            environment=frozenset(os.environ),
            threads=None,
            interrupt_file=tmp_path / "interrupt",
        )
        return TrialRun(request)

    return open_


@pytest.fixture(scope="module")
def trained(config: Path) -> Path:
    """The same run by the pipeline of `thresher train`."""
    output = config.parent / "trained"
    DPOPipeline(load_config(config, ["beta=0.2", f"output_dir={output}"])).run()
    return output


def test_a_killed_trial_resumes_and_is_the_run_of_train_bitwise(config, open_trial, trained):
    directory, expected = config.parent / "killed", [each for each in metric_log(trained) if "eval/loss" in each]
    first = open_trial("killed")
    assert first.next_record() == {"step": 2, "value": expected[0]["eval/loss"]}
    os.kill(first._process.pid, signal.SIGKILL)  # it waits for the answer to its first evaluation
    assert first.next_record() is None
    assert read_end(directory).state == "failed"
    again = open_trial("killed")
    records = list(iter(again.next_record, None))
    assert records == [{"step": each["step"], "value": each["eval/loss"]} for each in expected]
    assert read_end(directory) == TrialEnd("finished")
    assert metric_log(directory) == metric_log(trained)
    assert_same_weights(directory, trained)
    # a trial that has ended reports its log, and starts no process
    replayed = open_trial("killed")
    assert list(iter(replayed.next_record, None)) == records
    assert replayed._process is None


def test_a_stopped_trial_has_a_checkpoint_and_ends_the_same_after_a_kill(config, open_trial):
    stopped = open_trial("stopped")
    assert stopped.next_record()["step"] == 2
    stopped.close()
    assert read_end(config.parent / "stopped").state == "stopped early"
    assert metric_log(config.parent / "stopped")[-1]["step"] == 3

    killed = open_trial("killed while stopping")
    assert killed.next_record()["step"] == 2
    os.kill(killed._process.pid, signal.SIGKILL)
    assert killed.next_record() is None
    again = open_trial("killed while stopping")
    assert again.next_record()["step"] == 2
    again.close()
    for directory in ("stopped", "killed while stopping"):
        assert read_end(config.parent / directory).state == "stopped early"
    assert metric_log(config.parent / "stopped") == metric_log(config.parent / "killed while stopping")
    assert_same_weights(config.parent / "stopped", config.parent / "killed while stopping")
