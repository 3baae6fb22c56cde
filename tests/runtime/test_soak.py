"""A short soak: a few hundred steps with saves, evaluations and trackers open no file and keep no memory."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.soak import Watcher, soak
from tests.support.compared_runs import merge

pytestmark = pytest.mark.slow

NUM_STEPS = 400
LEAK = 100_000  # bytes a step: what a run of 2,000 steps of benchmarks/soak.py would show as 190 MiB


@pytest.fixture
def values(base, tmp_path) -> dict[str, Any]:
    often = {"save_steps": 20, "eval_steps": 20, "max_steps": NUM_STEPS, "track_with": ["console", "tensorboard"]}
    return merge(base, {**often, "runtime": "local", "output_dir": str(tmp_path / "out")})


def kilobytes_a_step(watcher: Watcher) -> float:
    """The least that is believable, so that noise does not fail the test: two standard errors below the slope."""
    slope = watcher.slope("driver", "own")
    return (slope.per_1000_steps - 2 * slope.error) * 1024 / 1000


def test_a_few_hundred_steps_open_no_file_and_keep_no_memory(values):
    watcher = soak(values, Watcher(every=5))
    assert len(watcher.steps) == NUM_STEPS // 5
    assert watcher.slope("driver", "fds").per_1000_steps < 5
    assert watcher.slope("driver", "threads").per_1000_steps < 5
    assert kilobytes_a_step(watcher) < LEAK / 1000 / 2


def test_a_leak_of_100_kilobytes_or_a_file_a_step_is_seen(values, tmp_path):
    kept: list[Any] = []

    def leak(step: int) -> None:
        kept.append(bytearray(b"x" * LEAK))
        if step % 10 == 0:
            kept.append((tmp_path / "leak").open("w"))

    watcher = soak(values, Watcher(every=5, each_step=leak))
    assert kilobytes_a_step(watcher) > LEAK / 1000 / 2
    assert watcher.slope("driver", "fds").per_1000_steps > 50
    for file in kept:
        if not isinstance(file, bytearray):
            file.close()
