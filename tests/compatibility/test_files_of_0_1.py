"""Reference caches and checkpoints written by 0.1 load, hit and resume within 1e-6; stores are prepared again.

Not bitwise: 0.1 summed the logps of a response in fp32, later versions in fp64. What is stored loads unchanged.
The tokens of some rows changed since, so a run does not reuse a store of 0.1 by itself; it can still be named.
files_of_0_1.tar.gz contains three runs of 4 steps of a tiny Llama with version 0.1: full training with a loss that has
state, LoRA with dropout, and two Ray workers that shard the model. Each has a checkpoint at step 2 and at step 4.
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
from thresher.data.store.reader import PairStore

ARCHIVE = Path(__file__).with_name("files_of_0_1.tar.gz")
METRICS_SINCE_0_1 = {"entropy", "lengths/longer_chosen", "lengths/longer_preferred"}
OF_SUMS = 1e-6
# in the log of 0.1, kl is a difference of fp32 sums near -40 nats, where adjacent numbers are 4e-6 apart
OF_KL = 5e-6


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


@pytest.mark.slow
@pytest.mark.parametrize("run", ["full", "lora", pytest.param("sharded", marks=pytest.mark.distributed)])
def test_a_run_of_0_1_resumes_with_its_cached_reference(old_files, run):
    last = old_files / run / "checkpoints" / "step-00000004"
    expected_log = metric_log(old_files / run)
    expected = last.rename(old_files / "expected")
    caches = sorted(path.relative_to(old_files) for path in (old_files / "cache").rglob("*.arrow"))
    stores = set((old_files / run / "data").iterdir())

    output = train(old_files, run)

    assert "resuming from" in output
    assert "24 pairs from the cache, 0 scored" in output
    prepared = set((old_files / run / "data").iterdir()) - stores
    assert {PairStore.open(store).digest for store in prepared} == {PairStore.open(store).digest for store in stores}
    assert sorted(path.relative_to(old_files) for path in (old_files / "cache").rglob("*.arrow")) == caches
    for record, expected_record in zip(metric_log(old_files / run), expected_log, strict=True):
        added = {name.removeprefix("eval/") for name in record.keys() - expected_record.keys()}
        assert expected_record.keys() <= record.keys()
        assert added <= METRICS_SINCE_0_1
        for name, value in expected_record.items():
            tolerance = OF_KL if name.endswith("kl") else OF_SUMS
            assert record[name] == pytest.approx(value, rel=OF_SUMS, abs=tolerance), name
    files = sorted(path.name for path in expected.glob("*.safetensors"))
    assert sorted(path.name for path in last.glob("*.safetensors")) == files
    for name in files:
        actual, expected_tensors = load_file(last / name), load_file(expected / name)
        assert actual.keys() == expected_tensors.keys()
        for key, tensor in expected_tensors.items():
            torch.testing.assert_close(actual[key], tensor, atol=OF_SUMS, rtol=0, msg=f"{name}: {key}")


def test_a_checkpoint_of_0_1_is_exported(old_files):
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
