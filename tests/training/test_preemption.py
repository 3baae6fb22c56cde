"""Signals that stop a run: what is left behind, and which error the run ends with."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from thresher.errors import RunStopped, WorkerLostError
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


def test_a_failure_ends_the_run_after_a_signal_and_is_raised_without_one(tmp_path):
    with pytest.raises(WorkerLostError):
        run(tmp_path / "stop", then=LOST)
    with pytest.raises(RunStopped) as raised:
        run(tmp_path / "stop", signal.SIGTERM, then=LOST)
    assert raised.value.exit_code == 128 + signal.SIGTERM
    assert not (tmp_path / "stop").exists()
