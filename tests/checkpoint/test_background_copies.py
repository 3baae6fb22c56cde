"""On a GPU, a save in the background makes the host wait for nothing, and the optimizer waits for the copies."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from tests.support.paths import ROOT
from tests.support.small_runs import make_base
from thresher.data.store.cache import user_cache_dir
from thresher.plan.simulate.fake_cuda import compile_guard


@pytest.mark.slow
def test_a_save_on_a_gpu_copies_on_a_side_stream_for_which_the_next_update_waits(tmp_path):
    config, result = tmp_path / "config.json", tmp_path / "result.json"
    config.write_text(json.dumps({**make_base(tmp_path), "output_dir": str(tmp_path / "out"), "pref_loss": "simpo"}))
    guard = "" if torch.version.cuda else str(compile_guard(user_cache_dir() / "simulate"))
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.simulated_save", guard, str(config), str(result)]

    ended = subprocess.run(command, env=os.environ, cwd=ROOT, capture_output=True, text=True, check=False)

    assert ended.returncode == 0, ended.stderr
    found = json.loads(result.read_text())
    assert found["num_copies"] > 50  # weights, two moments and a count each
    assert found["waits"] == {}
    assert found["order"] == [
        "the side stream waits for training",
        "copies end",
        "captured",
        "training waits for the copies",
        "the optimizer changes the weights",
        "the optimizer changes the weights",
        "the host waits for the copies",
    ]
