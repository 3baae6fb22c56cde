"""Faults injected into real runs at random times; `benchmarks/chaos.py` injects more of them, of more kinds."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.paths import ROOT

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

HARNESS = ROOT / "benchmarks" / "chaos.py"
KINDS = (
    "SIGKILL a policy worker",
    "SIGKILL a reference worker",
    "SIGKILL the driver",
    "SIGSTOP a policy worker",
    "SIGKILL during the rename of a checkpoint",
    "truncated or bit-flipped checkpoint (and SIGKILL the driver)",
)


# CI has one fault at a time: workers die and hang and the driver is stopped in test_recovery.py, a run in one process
# is killed in tests/training/test_resume.py, checkpoints break in tests/checkpoint
@pytest.mark.hand
def test_faults_do_not_change_the_results(base):
    train = base["actor_train"]["data_args"]["file_name"]
    validation = base["validation"]["data_args"]["file_name"]
    inputs = ["--model", base["pretrain"], "--pairs", train, validation]
    options = ["--faults", str(len(KINDS)), "--modes", "concurrent", "--steps", "150", "--kinds", *KINDS]
    ended = subprocess.run(
        [sys.executable, str(HARNESS), *options, *inputs], capture_output=True, text=True, timeout=1200
    )
    assert ended.returncode == 0, ended.stdout[-8000:] + ended.stderr[-2000:]
    assert f"| all | {len(KINDS)} | {len(KINDS)} |" in ended.stdout
    assert "every run ended bitwise equal to the undisturbed one" in ended.stdout
