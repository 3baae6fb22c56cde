"""Trials on Ray Tune, as processes that log without training: ASHA stops the worse one, a failed one ends alone."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray")

from thresher.runtime.ray.environment import set_environment
from thresher.sweep.results import TrialEnd, read_end
from thresher.sweep.trial import TrialRequest

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

LOGGING = """
import json, time
for step in range(1, {num_steps} + 1):
    with open("metrics.jsonl", "a") as log:
        log.write(json.dumps({{"step": step, "eval/loss": {loss}}}) + "\\n")
    time.sleep(0.1)
"""


def trial(directory: Path, script: str) -> TrialRequest:
    directory.mkdir()
    return TrialRequest(
        command=[sys.executable, "-c", script],
        environment=dict(os.environ),
        working_dir=directory,
        directory=directory,
        log=directory / "metrics.jsonl",
        metric="eval/loss",
        interrupt_file=directory.parent / "interrupt",
    )


def test_asha_stops_the_worse_trial_and_a_failed_one_does_not_end_the_sweep(tmp_path):
    set_environment(None)
    from thresher.sweep.tune import asha, run_trials

    better, failed, worse = (tmp_path / name for name in ("better", "failed", "worse"))
    run_trials(
        {
            0: trial(better, LOGGING.format(num_steps=4, loss=0.1)),
            1: trial(failed, "import sys; sys.exit(7)"),
            2: trial(worse, LOGGING.format(num_steps=3000, loss=0.9)),
        },
        max_concurrent=None,
        gpus_per_trial=0,
        scheduler=asha(grace_steps=2, reduction_factor=2, mode="min"),
        interrupt_file=tmp_path / "interrupt",
        stop_seconds=60,
    )
    assert read_end(better) == TrialEnd("finished")
    assert read_end(failed) == TrialEnd("failed", "exit code 7; see output.log")
    assert read_end(worse) == TrialEnd("stopped early")
