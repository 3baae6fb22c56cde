"""Stores, reference caches and checkpoints written between 0.2.0 and 0.3 load, hit and resume bitwise.

files_of_0_2.tar.gz contains three runs of 4 steps of a tiny Llama: full training with recomputation and a loss that has
state, LoRA with dropout, and two Ray workers that shard the model. Each has a checkpoint at step 2 and at step 4; they
share a cache of stores and reference logps. Checkpoints of 0.2 keep some settings under earlier names.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.compared_runs import metric_log
from tests.support.forks import python

ARCHIVE = Path(__file__).with_name("files_of_0_2.tar.gz")


@pytest.fixture
def old_files(tmp_path):
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


def train(directory: Path, run: str) -> str:
    completed = subprocess.run(
        [*python(), "-m", "thresher", "train", f"{run}.yaml"],
        cwd=directory,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr
    return completed.stdout + completed.stderr


def cached(directory: Path) -> list[Path]:
    return sorted(path.relative_to(directory) for path in (directory / "cache").rglob("*.arrow"))


@pytest.mark.slow
@pytest.mark.parametrize("run", ["full", "lora", pytest.param("sharded", marks=pytest.mark.distributed)])
def test_a_run_of_0_2_resumes_bitwise_with_its_store_and_its_cached_reference(old_files, run):
    last = old_files / run / "checkpoints" / "step-00000004"
    expected_log, files = metric_log(old_files / run), cached(old_files)
    expected = last.rename(old_files / "expected")

    output = train(old_files, run)

    assert "resuming from" in output
    assert "24 pairs from the cache, 0 scored" in output
    assert cached(old_files) == files, "nothing was prepared or scored again"
    assert metric_log(old_files / run) == expected_log
    names = sorted(path.name for path in expected.glob("*.safetensors"))
    assert sorted(path.name for path in last.glob("*.safetensors")) == names
    for name in names:
        actual, tensors = load_file(last / name), load_file(expected / name)
        assert actual.keys() == tensors.keys()
        assert all(torch.equal(actual[key], tensor) for key, tensor in tensors.items()), name


def test_a_checkpoint_of_0_2_is_exported(old_files):
    completed = subprocess.run(
        [*python(), "-m", "thresher", "export", "sharded", "--output", "model"],
        cwd=old_files,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr
    shutil.rmtree(old_files / "sharded")
    weights = load_file(old_files / "model" / "model.safetensors")
    assert sum(tensor.numel() for tensor in weights.values()) > 6_000
