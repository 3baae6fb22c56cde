"""A worker that is killed in the middle: the run goes on by itself and ends as if nothing had happened."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.compared_runs import merge, metric_log
from tests.support.logged import logged
from tests.support.small_runs import last_weights
from tests.support.worker_killer import Killer
from thresher.config import parse_config
from thresher.errors import RunStopped
from thresher.pipeline import DPOPipeline

pytestmark = pytest.mark.distributed

TWO = {"runtime": "ray", "actor_train": {"num_workers": 2}}


def run(values: dict[str, Any], output: Path, console: Any = None) -> list[str]:
    with logged() as records:
        DPOPipeline(parse_config({**values, "output_dir": str(output)}), console=console).run()
    return [record.getMessage() for record in records]


@pytest.fixture(scope="module")
def values(base):
    return merge(base, {**TWO, "save_steps": 2, "async_save": False, "track_with": ["console"]})


@pytest.fixture(scope="module")
def whole(values, ray_here, tmp_path_factory):
    output = tmp_path_factory.mktemp("whole")
    run(values, output)
    return output


def recovery_of(output: Path) -> dict[str, Any]:
    (line,) = (output / "logs" / "recoveries.jsonl").read_text().splitlines()
    recovery: dict[str, Any] = json.loads(line)
    return recovery


def assert_equal_runs(one: Path, other: Path) -> None:
    assert metric_log(one) == metric_log(other)
    ours, theirs = last_weights(one), last_weights(other)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], weight) for name, weight in theirs.items())


@pytest.mark.parametrize("step", [1, 3])
def test_a_killed_policy_worker_changes_nothing(values, whole, tmp_path, step):
    killer = Killer(step, "ActorWorker")
    lines = run(values, tmp_path / "killed", killer)
    assert killer.killed
    assert any("restarting from" in line for line in lines)
    assert_equal_runs(tmp_path / "killed", whole)
    recovery = recovery_of(tmp_path / "killed")
    assert recovery["from_step"] == (0 if step == 1 else 2)
    assert recovery["steps_repeated"] <= 2


def test_a_worker_that_hangs_is_named_with_the_last_thing_it_did(values, whole, tmp_path):
    stopper = Killer(3, "ActorWorker", signal.SIGSTOP)
    heartbeat_timeout = 16.0
    config = parse_config({**values, "output_dir": str(tmp_path / "hung"), "heartbeat_timeout": heartbeat_timeout})
    with logged(logging.WARNING) as records:
        DPOPipeline(config, console=stopper).run()
    record, *others = [record for record in records if " hangs: " in record.getMessage()]
    assert not others, records
    told = record.getMessage()
    words = r"actor_train worker [01] of 2 hangs: no answer for 12 s; the last thing it told, begun \d+ s ago: "
    # asked every 2 s, a worker may have told nothing since it was built; these steps take milliseconds
    work = r"(step \d: |saving step|evaluating after|building the|checking that|loading the|meeting the)[^;]*"
    assert re.match(rf"{words}{work}\(process {stopper.killed}\); restarting from", told), told
    # looked for within the timeout; until it is told, the other workers are ended and checkpoints verified
    assert record.created - stopper.time <= heartbeat_timeout + 8
    assert not Path(f"/proc/{stopper.killed}").exists()
    assert_equal_runs(tmp_path / "hung", whole)


class Asker(Killer):
    """A console that sends this process a signal when a step is logged for the first time."""

    def log(self, step: int, metrics: object) -> None:  # noqa: ARG002
        if step == self._step and not self.killed:
            self.killed = os.getpid()
            os.kill(self.killed, signal.SIGTERM)


@pytest.mark.parametrize("where", [{}, TWO], ids=["in process", "two workers"])
def test_sigterm_saves_the_step_under_way_and_the_same_command_goes_on(base, ray_here, tmp_path, where):
    values = merge(base, {**where, "save_steps": 0, "eval_steps": 0, "max_steps": 150, "track_with": ["console"]})
    run(values, tmp_path / "whole")
    before = signal.getsignal(signal.SIGTERM)
    config = parse_config({**values, "output_dir": str(tmp_path / "stopped")})
    stopped = pytest.raises(RunStopped, match=r"after step \d+, which is saved; the same command goes on")
    with logged(logging.WARNING) as records, stopped as caught:
        DPOPipeline(config, console=Asker(3, "")).run()
    assert caught.value.exit_code == 128 + signal.SIGTERM
    assert records[-1].getMessage().startswith("SIGTERM: finishing and saving the current step (up to 60 s)")
    (saved,) = (tmp_path / "stopped" / "checkpoints").glob("step-*")
    assert 3 <= int(saved.name.removeprefix("step-")) < 150
    assert signal.getsignal(signal.SIGTERM) is before
    run(values, tmp_path / "stopped")
    assert_equal_runs(tmp_path / "stopped", tmp_path / "whole")
