"""Six faults injected into real runs at random times; `benchmarks/chaos.py` injects more of them, of more kinds."""

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


def test_six_faults_do_not_change_the_results(base):
    train = base["actor_train"]["data_args"]["file_name"]
    validation = base["validation"]["data_args"]["file_name"]
    inputs = ["--model", base["pretrain"], "--pairs", train, validation]
    options = ["--faults", "6", "--modes", "concurrent", "--steps", "150", "--kinds", *KINDS]
    ended = subprocess.run(
        [sys.executable, str(HARNESS), *options, *inputs], capture_output=True, text=True, timeout=1200
    )
    assert ended.returncode == 0, ended.stdout[-8000:] + ended.stderr[-2000:]
    assert "| all | 6 | 6 |" in ended.stdout
    assert "every run ended bitwise equal to the undisturbed one" in ended.stdout
