"""A short soak test: a few hundred steps with saves, evaluations and trackers leak no files and no memory."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.soak import Watcher, soak
from tests.support.compared_runs import merge

pytestmark = pytest.mark.slow

NUM_STEPS = 400
LEAK = 100_000  # bytes per step: 190 MiB in a run of 2,000 steps of benchmarks/soak.py


@pytest.fixture
def values(base, tmp_path) -> dict[str, Any]:
    frequent = {"save_steps": 20, "eval_steps": 20, "max_steps": NUM_STEPS, "track_with": ["console", "tensorboard"]}
    return merge(base, {**frequent, "runtime": "local", "output_dir": str(tmp_path / "out")})


def kilobytes_per_step(watcher: Watcher) -> float:
    """A lower bound of the slope, two standard errors below it, so that noise does not fail the test."""
    slope = watcher.slope("driver", "own")
    return (slope.per_1000_steps - 2 * slope.error) * 1024 / 1000


def test_a_few_hundred_steps_leak_no_files_and_no_memory(values):
    watcher = soak(values, Watcher(every=5))
    assert len(watcher.steps) == NUM_STEPS // 5
    assert watcher.slope("driver", "fds").per_1000_steps < 5
    assert watcher.slope("driver", "threads").per_1000_steps < 5
    assert kilobytes_per_step(watcher) < LEAK / 1000 / 2


@pytest.mark.hand  # CI has the test that this one tests
def test_a_leak_of_100_kilobytes_per_step_or_a_file_per_10_steps_is_detected(values, tmp_path):
    kept: list[Any] = []

    def leak(step: int) -> None:
        kept.append(bytearray(b"x" * LEAK))
        if step % 10 == 0:
            kept.append((tmp_path / "leak").open("w"))

    watcher = soak(values, Watcher(every=5, each_step=leak))
    assert kilobytes_per_step(watcher) > LEAK / 1000 / 2
    assert watcher.slope("driver", "fds").per_1000_steps > 50
    for file in kept:
        if not isinstance(file, bytearray):
            file.close()
