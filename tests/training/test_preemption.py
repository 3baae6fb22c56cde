"""Signals that stop a run: what is left behind, and which error the run ends with."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from thresher.builders.run import describe_unfinished_stop
from thresher.config import parse_config
from thresher.errors import RunStopped, WorkerLostError
from thresher.training import preemption
from thresher.training.preemption import stop_on_signals

LOST = WorkerLostError("worker 1 died")


def run(file: Path, *signals: signal.Signals, then: Exception) -> None:
    """A run that gets signals, and then ends with an error."""
    with stop_on_signals(file, deadline=60):
        for number in signals:
            os.kill(os.getpid(), number)
            assert file.exists()
        raise then


def test_the_handlers_of_signals_are_restored(tmp_path):
    def handlers():
        return [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]

    before = handlers()
    with stop_on_signals(tmp_path / "stop", deadline=60):
        assert handlers() != before
    assert handlers() == before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_creates_the_stop_file_and_sets_the_exit_code(tmp_path, number):
    file = tmp_path / "missing" / "run" / "stop"
    with pytest.raises(RunStopped) as raised:
        run(file, number, then=RunStopped(3))
    assert raised.value.exit_code == 128 + number
    assert not file.exists()


def test_a_second_signal_exits_immediately(tmp_path):
    with pytest.raises(SystemExit) as raised:
        run(tmp_path / "stop", signal.SIGTERM, signal.SIGINT, then=LOST)
    assert raised.value.code == 128 + signal.SIGINT


def test_a_run_that_does_not_stop_in_time_says_what_is_lost_and_exits(tmp_path):
    """In a child process, which the deadline ends without unwinding."""
    reader, writer = os.pipe()
    if not (child := os.fork()):
        with stop_on_signals(tmp_path / "stop", 0.05, lambda: os.write(writer, b"nothing saved")):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        os._exit(0)
    os.close(writer)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 128 + signal.SIGTERM
    assert os.read(reader, 100) == b"nothing saved"
    os.close(reader)


def test_a_report_that_hangs_does_not_delay_the_exit(tmp_path, monkeypatch):
    monkeypatch.setattr(preemption, "_SECONDS_TO_REPORT", 0.05)
    if not (child := os.fork()):
        with stop_on_signals(tmp_path / "stop", 0.05, lambda: time.sleep(60)):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        os._exit(0)
    started = time.monotonic()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 128 + signal.SIGTERM
    assert time.monotonic() - started < 30


@pytest.mark.parametrize(
    ("steps", "since"), [((), "nothing saved at all"), ((4, 12), "nothing saved since step 12")], ids=["none", "two"]
)
def test_the_message_at_the_deadline_names_the_newest_checkpoint_and_the_setting(tmp_path, steps, since):
    for step in steps:
        (tmp_path / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
    config = parse_config({"output_dir": str(tmp_path), "graceful_stop_timeout": 45})
    message = describe_unfinished_stop(config)
    assert message.startswith(f"not finished after 45 s; {since}; raise graceful_stop_timeout")


def test_a_failure_ends_the_run_after_a_signal_and_is_raised_without_one(tmp_path):
    with pytest.raises(WorkerLostError):
        run(tmp_path / "stop", then=LOST)
    with pytest.raises(RunStopped) as raised:
        run(tmp_path / "stop", signal.SIGTERM, then=LOST)
    assert raised.value.exit_code == 128 + signal.SIGTERM
    assert not (tmp_path / "stop").exists()
