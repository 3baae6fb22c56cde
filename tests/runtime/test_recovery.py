"""A run recovers from killed and hung workers and from signals with bit-identical results."""

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
def uninterrupted(values, ray_here, tmp_path_factory):
    output = tmp_path_factory.mktemp("uninterrupted")
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


# CI: after step 1, before the first checkpoint. A run recovers from a checkpoint in the test of a hung worker
@pytest.mark.parametrize("step", [1, pytest.param(3, marks=pytest.mark.hand)])
def test_a_killed_policy_worker_does_not_change_the_results(values, uninterrupted, tmp_path, capsys, step):
    killer = Killer(step, "ActorWorker")
    lines = run(values, tmp_path / "killed", killer)
    assert killer.killed
    (line,) = [line for line in lines if "died" in line and not line.startswith("Ray's report")]
    logs = tmp_path / "killed" / "logs"
    assert re.fullmatch(
        rf"actor_train worker (\d) of 2 died: killed by a signal, often SIGKILL because memory ran out "
        rf"\(process {killer.killed} on \S+\); see {logs}/workers/actor_train-\1\.log; restarting from .+ "
        r"\(attempt 1/5 since the last new checkpoint\)",
        line,
    )
    assert capsys.readouterr().out == ""  # where Ray prints its report
    assert "some common causes" in (logs / "run.log").read_text().lower()  # the rest of Ray's report
    assert_equal_runs(tmp_path / "killed", uninterrupted)
    recovery = recovery_of(tmp_path / "killed")
    assert recovery["from_step"] == (0 if step == 1 else 2)
    assert recovery["steps_repeated"] <= 2


@pytest.mark.hand  # CI has a worker that never enters a collective
def test_a_hung_worker_is_reported_with_its_last_activity(values, uninterrupted, tmp_path):
    stopper = Killer(3, "ActorWorker", signal.SIGSTOP)
    heartbeat_timeout = 16.0
    config = parse_config({**values, "output_dir": str(tmp_path / "hung"), "heartbeat_timeout": heartbeat_timeout})
    with logged(logging.WARNING) as records:
        DPOPipeline(config, console=stopper).run()
    record, *others = [record for record in records if " is unresponsive: " in record.getMessage()]
    assert not others, records
    message = record.getMessage()
    start = r"actor_train worker [01] of 2 is unresponsive: no heartbeat for 12 s; last activity, started \d+ s ago: "
    # polled every 2 s, so the last heartbeat may be older than these steps, which take milliseconds
    activity = r"(step \d: |saving step|evaluating after|building the|checking the|loading the|joining the)[^;]*"
    assert re.match(rf"{start}{activity}\(process {stopper.killed}\); restarting from", message), message
    # detected within the timeout; before it is logged, the other workers are killed and checkpoints verified
    assert record.created - stopper.time <= heartbeat_timeout + 8
    assert not Path(f"/proc/{stopper.killed}").exists()
    assert_equal_runs(tmp_path / "hung", uninterrupted)


@pytest.mark.hand  # CI has the timeout of a collective, and the report on missing progress (test_stalls.py)
def test_a_worker_that_never_enters_a_collective_is_found_by_its_missing_progress(
    values, uninterrupted, tmp_path, monkeypatch
):
    """Its process lives and sends heartbeats; the other rank waits for it in a real collective of gloo."""
    from tests.support import stalling_worker
    from thresher.runtime.ray import runtime

    monkeypatch.setattr(runtime, "ActorWorker", stalling_worker.StallingWorker)
    heartbeat_timeout, mark = 16.0, tmp_path / "stalled"
    own = {"system_envs": {stalling_worker.VARIABLE: str(mark)}, "heartbeat_timeout": heartbeat_timeout}
    config = parse_config({**values, **own, "output_dir": str(tmp_path / "stuck")})
    with logged(logging.WARNING) as records:
        DPOPipeline(config, console=None).run()
    (record,) = [record for record in records if "workers are stuck" in record.getMessage()]
    worker = r"actor_train worker [01] of 2, step 4: (training|waiting for the reference) \(process \d+\)"
    start = rf"workers are stuck: none has made progress for \d+ s; {worker}; {worker}; their logs have their stacks; "
    assert re.match(start + "restarting from .+step-00000002 ", record.getMessage()), record.getMessage()
    # before it is logged, the workers write their stacks and are killed, and checkpoints are verified
    assert record.created - float(mark.read_text()) <= heartbeat_timeout + 18
    waiting, sleeping = ((tmp_path / "stuck/logs/workers" / f"actor_train-{rank}.log").read_text() for rank in (0, 1))
    assert "in never_enter_the_collectives" in sleeping
    assert "/torch/distributed/" in waiting, waiting  # in any of its collectives
    assert "in never_enter_the_collectives" not in waiting
    assert_equal_runs(tmp_path / "stuck", uninterrupted)


class Terminator(Killer):
    """A console tracker that sends SIGTERM to this process when a step is logged for the first time."""

    def log(self, step: int, metrics: object) -> None:  # noqa: ARG002
        if step == self._step and not self.killed:
            self.killed = os.getpid()
            os.kill(self.killed, signal.SIGTERM)


@pytest.mark.parametrize("where", [{}, TWO], ids=["in process", "two workers"])
def test_sigterm_saves_the_current_step_and_the_same_command_resumes(base, ray_here, tmp_path, where):
    values = merge(base, {**where, "save_steps": 0, "eval_steps": 0, "max_steps": 60, "track_with": ["console"]})
    run(values, tmp_path / "uninterrupted")
    before = signal.getsignal(signal.SIGTERM)
    config = parse_config({**values, "output_dir": str(tmp_path / "stopped")})
    stopped = pytest.raises(RunStopped, match=r"after step \d+ \(checkpoint saved\); rerun the same command to resume")
    with logged(logging.WARNING) as records, stopped as caught:
        DPOPipeline(config, console=Terminator(3, "")).run()
    assert caught.value.exit_code == 128 + signal.SIGTERM
    shown = [record.getMessage() for record in records]
    assert any(line.startswith("SIGTERM: stopping and saving (up to 60 s)") for line in shown), shown
    (saved,) = (tmp_path / "stopped" / "checkpoints").glob("step-*")
    assert 3 <= int(saved.name.removeprefix("step-")) < 60
    assert signal.getsignal(signal.SIGTERM) is before
    run(values, tmp_path / "stopped")
    assert_equal_runs(tmp_path / "stopped", tmp_path / "uninterrupted")
