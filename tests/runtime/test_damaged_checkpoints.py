"""Ranks verify the files of a checkpoint before training: a damaged one is skipped, and the driver hashes little."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.compared_runs import merge, metric_log
from tests.support.logged import logged
from tests.support.small_runs import assert_same_weights
from thresher.checkpoint import manifest
from thresher.checkpoint.manager import READ_BY_DRIVER
from thresher.config import parse_config
from thresher.errors import CheckpointError
from thresher.pipeline import DPOPipeline

LAST, BEFORE = "step-00000004", "step-00000002"


def run(values: dict[str, Any], output: Path) -> list[str]:
    with logged() as records:
        DPOPipeline(parse_config({**values, "output_dir": str(output)})).run()
    return [record.getMessage() for record in records]


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.fixture
def hashed(monkeypatch) -> dict[str, int]:
    """Bytes that this process has hashed, by file."""
    found: dict[str, int] = {}
    record_files = manifest.record_files

    def counting(directory: Path, names: Sequence[str]) -> dict[str, manifest.FileRecord]:
        records = record_files(directory, names)
        found.update({f"{directory.name}/{name}": record.size for name, record in records.items()})
        return records

    monkeypatch.setattr(manifest, "record_files", counting)
    return found


@pytest.fixture(scope="module")
def finished(base, tmp_path_factory) -> Path:
    """A run of four steps in one process, with checkpoints of steps 2 and 4."""
    output = tmp_path_factory.mktemp("finished")
    run(base, output)
    return output


@pytest.fixture
def copy(finished, tmp_path) -> Path:
    return shutil.copytree(finished, tmp_path / "out")


@pytest.mark.parametrize("name", ["weights.safetensors", "optimizer.json", "rng.json", *READ_BY_DRIVER])
def test_a_run_falls_back_to_the_checkpoint_before_a_damaged_one(base, finished, copy, name):
    flip_a_bit(copy / "checkpoints" / LAST / name)

    lines = run(base, copy)

    # a file that the driver reads is also found by the checks before the run
    (skipped,) = {line for line in lines if line.startswith("skipped an invalid checkpoint: ")}
    assert f"{LAST} failed verification: {name} does not match its digest" in skipped
    assert f"resuming from {copy / 'checkpoints' / BEFORE}" in lines
    assert metric_log(copy) == metric_log(finished)
    assert_same_weights(copy, finished)


def test_a_run_without_an_intact_checkpoint_starts_again(base, finished, copy):
    for step in (BEFORE, LAST):
        flip_a_bit(copy / "checkpoints" / step / "optimizer.safetensors")

    lines = run(base, copy)

    assert len([line for line in lines if line.startswith("skipped an invalid checkpoint: ")]) == 2
    assert not any(line.startswith("resuming from") for line in lines)
    assert_same_weights(copy, finished)


def test_a_damaged_checkpoint_that_is_named_is_an_error(base, copy):
    path = copy / "checkpoints" / LAST
    flip_a_bit(path / "weights.safetensors")
    message = r"weights\.safetensors does not match its digest; resume from a different checkpoint"
    with pytest.raises(CheckpointError, match=message):
        run({**base, "resume_from_checkpoint": str(path)}, copy)


@pytest.mark.distributed
def test_the_driver_hashes_only_what_it_reads_and_workers_find_the_damage(base, ray_here, tmp_path, hashed):
    values = merge(base, {"runtime": "ray", "actor_train": {"num_workers": 2}})
    output, whole = tmp_path / "out", tmp_path / "whole"
    run(values, output)
    shutil.copytree(output, whole)
    checkpoints = output / "checkpoints"
    assert (checkpoints / LAST / "weights-00002-of-00002.safetensors").is_file()
    flip_a_bit(checkpoints / LAST / "weights-00002-of-00002.safetensors")
    hashed.clear()

    lines = run(values, output)

    (skipped,) = [line for line in lines if line.startswith("skipped an invalid checkpoint: ")]
    assert "weights-00002-of-00002.safetensors does not match its digest" in skipped
    assert f"resuming from {checkpoints / BEFORE}" in lines
    assert_same_weights(output, whole)
    before = sum(file.stat().st_size for step in (LAST, BEFORE) for file in (checkpoints / step).iterdir())
    print(f"the driver hashed {sum(hashed.values()):,} bytes of {before:,}")
    assert set(hashed) == {f"{step}/{name}" for step in (LAST, BEFORE) for name in READ_BY_DRIVER}
