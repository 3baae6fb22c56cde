"""Decisions of ASHA depend on the grid and the metrics, not on which trial is faster."""

from __future__ import annotations

import threading

import pytest

pytest.importorskip("ray")

from thresher.runtime.ray.tune import Turns


def test_a_trial_waits_for_earlier_trials_and_never_for_later_ones(tmp_path):
    turns = Turns(tmp_path / "turns.jsonl", tmp_path / "stop")
    turns.path.touch()
    turns.wait(0, 8)  # the first trial does not wait
    seen: list[str] = []

    def report() -> None:
        turns.wait(2, 4)
        seen.append("third")

    thread = threading.Thread(target=report)
    thread.start()
    for index, step in ((0, 4), (3, 8), (1, 2)):
        turns.take(index, step)
        thread.join(0.2)
        assert not seen
    turns.take(1, float("inf"))  # it has ended
    thread.join(10)
    assert seen == ["third"]


def test_an_interrupted_sweep_waits_for_nothing(tmp_path):
    turns = Turns(tmp_path / "turns.jsonl", tmp_path / "stop")
    turns.path.touch()
    turns.interrupt_file.touch()
    turns.wait(5, 1)
