"""Nothing outside the given directories is written, deleted or read through crafted names or symlinks."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.attacks import CommandLine, Run, update_manifest
from tests.support.staged import staging
from thresher.checkpoint.manager import list_checkpoints, prune
from thresher.checkpoint.save import recover
from thresher.durable import is_safe_relative_path
from thresher.errors import CheckpointError, UserError


@pytest.fixture
def outside_directory(tmp_path: Path) -> Path:
    """A directory outside the run, which must not change."""
    directory = tmp_path / "precious"
    (directory / "deep").mkdir(parents=True)
    (directory / "deep" / "letter.txt").write_text("mine")
    (directory / "x.damaged").write_text("mine")
    (directory / ".partial-0").write_text("mine")
    os.utime(directory / ".partial-0", (0, 0))
    return directory


def content_of(directory: Path) -> dict[str, str]:
    """The files of a directory; symlinks are listed, not followed."""
    return {
        str(path.relative_to(directory)): f"-> {path.readlink()}" if path.is_symlink() else path.read_text("latin-1")
        for path in sorted(directory.rglob("*"))
        if path.is_symlink() or path.is_file()
    }


def files_outside(run: Run) -> dict[str, str]:
    """The files next to a run's output and cache directories."""
    return {
        name: content
        for name, content in content_of(run.directory.parent).items()
        if not name.startswith((f"{run.directory.name}/output", f"{run.directory.name}/cache"))
    }


@pytest.mark.parametrize("name", ["../../escaped", "/tmp/thresher-escaped", ".."])
def test_a_run_name_is_not_used_as_a_path(attacked: Run, thresher: CommandLine, name: str) -> None:
    shutil.rmtree(attacked.output)
    trackers = {"track_with": ["console", "tensorboard", "wandb", "mlflow"]}
    config = attacked.config(exp_name=name, tracker_kwargs={"wandb_mode": "offline"}, **trackers)
    before = files_outside(attacked)
    assert thresher("train", config).code == 0
    assert files_outside(attacked) == before
    assert not Path("/tmp/thresher-escaped").exists()


def test_a_tracker_project_name_is_not_used_as_a_path(attacked: Run, thresher: CommandLine) -> None:
    shutil.rmtree(attacked.output)
    kwargs = {"wandb_mode": "offline", "wandb_project": "../../escaped", "wandb_entity": "../../e"}
    config = attacked.config(track_with=["wandb"], tracker_kwargs=kwargs)
    before = files_outside(attacked)
    thresher("train", config)
    assert files_outside(attacked) == before


def test_a_run_id_in_a_resumed_log_is_not_used_as_a_path(attacked: Run, thresher: CommandLine) -> None:
    (attacked.output / "logs" / "wandb_run.json").write_text('{"id": "../../../escaped", "complete_through": 0}')
    (attacked.output / "logs" / "mlflow_run.json").write_text('{"run_id": "../../../escaped"}')
    kwargs = {"wandb_mode": "offline"}
    changes: dict[str, Any] = {"resume_from_checkpoint": "auto", "max_steps": 3, "tracker_kwargs": kwargs}
    config = attacked.config(track_with=["wandb", "mlflow"], **changes)
    before = files_outside(attacked)
    assert thresher("train", config).code == 0
    assert files_outside(attacked) == before


@pytest.mark.parametrize("name", ["../../letter.txt", "/etc/hostname", "..", "a/../../b"])
def test_a_manifest_with_outside_file_names_is_rejected(attacked: Run, name: str) -> None:
    from thresher.checkpoint.manifest import FileRecord, Manifest, list_files, record_files, verify, write_manifest

    checkpoint = attacked.checkpoint
    records = record_files(checkpoint, list_files(checkpoint))
    (attacked.output / "letter.txt").write_text("mine")
    write_manifest(checkpoint, Manifest(2, records | {name: FileRecord(4, "00" * 32)}))
    with pytest.raises(CheckpointError, match="is missing"):
        verify(checkpoint)


def test_a_symlink_in_a_checkpoint_is_rejected(
    attacked: Run, outside_directory: Path, thresher: CommandLine, tmp_path: Path
) -> None:
    weights = attacked.checkpoint / "weights.safetensors"
    weights.rename(outside_directory / "weights.safetensors")
    weights.symlink_to(outside_directory / "weights.safetensors")
    result = thresher("export", attacked.checkpoint, "--output", tmp_path / "out")
    assert result.code == 2
    assert "is a symlink" in result.text


def save(root: Path, step: int) -> Path:
    with staging(root, step) as directory:
        (directory / "state.json").write_text("{}")
    return root / f"step-{step:08d}"


def test_retention_removes_a_symlink_but_not_its_target(tmp_path: Path, outside_directory: Path) -> None:
    root = tmp_path / "checkpoints"
    before = content_of(outside_directory)
    root.mkdir()
    (root / "step-00000001").symlink_to(outside_directory)
    save(root, 2)
    save(root, 3)
    prune(root, 1)
    assert [path.name for path in list_checkpoints(root)] == ["step-00000003"]
    assert content_of(outside_directory) == before
    assert not list(root.glob(".deleted-*"))


def test_a_save_replaces_a_symlink_but_not_its_target(tmp_path: Path, outside_directory: Path) -> None:
    root = tmp_path / "checkpoints"
    root.mkdir()
    before = content_of(outside_directory)
    for step, target in ((1, outside_directory), (2, tmp_path / "nowhere")):
        (root / f"step-{step:08d}").symlink_to(target)
        assert not save(root, step).is_symlink()
    assert content_of(outside_directory) == before
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("name", [".deleted-step-00000001-a", ".staging-step-00000001-a", ".replaced-step-00000002-a"])
def test_recovery_removes_a_symlink_but_not_its_target(tmp_path: Path, outside_directory: Path, name: str) -> None:
    root = tmp_path / "checkpoints"
    save(root, 2)
    before = content_of(outside_directory)
    (root / name).symlink_to(outside_directory)
    recover(root)
    assert content_of(outside_directory) == before
    assert not (root / name).is_symlink()


def test_pruning_the_cache_removes_nothing_outside_it(
    attacked: Run, outside_directory: Path, thresher: CommandLine
) -> None:
    before = content_of(outside_directory)
    (attacked.cache / "linked").symlink_to(outside_directory)
    (attacked.cache / ".deleted-x").symlink_to(outside_directory)
    assert thresher("cache", "prune", "--yes", "--cache-dir", attacked.cache).code == 0
    assert content_of(outside_directory) == before
    assert list(attacked.cache.iterdir()) == []


@pytest.mark.parametrize("identity", ["../precious", "/", ".."])
def test_an_identity_to_prune_is_not_used_as_a_path(
    attacked: Run, outside_directory: Path, thresher: CommandLine, identity: str
) -> None:
    before = content_of(outside_directory)
    result = thresher("cache", "prune", "--yes", "--identity", identity, "--cache-dir", attacked.cache)
    assert result.code == 2
    assert content_of(outside_directory) == before


@pytest.mark.parametrize("index", ["model.safetensors.index.json", "pytorch_model.bin.index.json"])
@pytest.mark.parametrize("absolute", [False, True])
def test_a_weight_index_with_outside_file_names_is_rejected(
    attacked: Run, thresher: CommandLine, index: str, absolute: bool
) -> None:
    outside = attacked.directory / "model.safetensors"
    shutil.move(attacked.model / "model.safetensors", outside)
    name = str(outside) if absolute else "../model.safetensors"
    (attacked.model / index).write_text(json.dumps({"metadata": {}, "weight_map": {"lm_head.weight": name}}))
    shutil.rmtree(attacked.output)
    for command in ("train", "precompute-reference"):
        result = thresher(command, attacked.config())
        assert result.code == 2
        assert "which is outside of the model directory" in result.text


def test_an_invalid_weight_index_is_rejected(attacked: Run, thresher: CommandLine) -> None:
    (attacked.model / "model.safetensors.index.json").write_text("[1]")
    result = thresher("export", attacked.output, "--output", attacked.directory / "out")
    assert result.code == 2
    assert "is not a weight index" in result.text


@pytest.mark.parametrize("name", ["../../shard.arrow", "/etc/hostname", "shards/../../x"])
def test_a_store_with_outside_file_names_is_rejected(attacked: Run, thresher: CommandLine, name: str) -> None:
    manifest = attacked.store / "manifest.json"
    values = json.loads(manifest.read_text())
    values["shards"][0]["name"] = name
    manifest.write_text(json.dumps(values))
    result = thresher("inspect", attacked.store)
    assert result.code == 2
    assert "a path outside the store" in result.text


def test_a_saved_data_set_with_outside_file_names_is_rejected(
    attacked: Run, thresher: CommandLine, tmp_path: Path
) -> None:
    import datasets

    saved, other = tmp_path / "saved", tmp_path / "other"
    for path in (saved, other):
        datasets.Dataset.from_list([{"prompt": "w4 ", "chosen": "w5", "rejected": "w6"}]).save_to_disk(str(path))
    state = json.loads((saved / "state.json").read_text())
    state["_data_files"] = [{"filename": f"../other/{state['_data_files'][0]['filename']}"}]
    (saved / "state.json").write_text(json.dumps(state))
    options = ("--template", "raw", "--model", attacked.model, "--output", tmp_path / "store")
    result = thresher("prepare", saved, *options)
    assert result.code == 2
    assert "which is outside its directory" in result.text


def test_bad_rows_are_not_written_through_a_symlink(
    attacked: Run, outside_directory: Path, thresher: CommandLine, tmp_path: Path
) -> None:
    with attacked.rows.open("a") as rows:
        rows.write("{\n")
    letter = outside_directory / "deep" / "letter.txt"
    (tmp_path / "store.quarantine.jsonl").symlink_to(letter)
    options = ("--template", "raw", "--on-bad-row", "quarantine", "--model", attacked.model)
    assert thresher("prepare", attacked.rows, *options, "--output", tmp_path / "store").code == 0
    assert letter.read_text() == "mine"
    assert not (tmp_path / "store.quarantine.jsonl").is_symlink()


@pytest.mark.parametrize("command", ["prepare", "export"])
def test_nothing_is_created_or_deleted_through_a_symlink(
    attacked: Run, outside_directory: Path, thresher: CommandLine, tmp_path: Path, command: str
) -> None:
    before = content_of(outside_directory)
    (tmp_path / ".out.partial").symlink_to(outside_directory)
    source = (
        (attacked.rows, "--template", "raw", "--model", attacked.model) if command == "prepare" else (attacked.output,)
    )
    result = thresher(command, *source, "--output", tmp_path / "out")
    assert result.code == 2
    assert "is a symlink" in result.text
    assert content_of(outside_directory) == before


@pytest.mark.parametrize("name", ["metrics.jsonl", ".metrics.jsonl.new", "mlflow_run.json", "tensorboard"])
def test_logs_are_not_written_through_a_symlink(
    attacked: Run, outside_directory: Path, thresher: CommandLine, name: str
) -> None:
    before = content_of(outside_directory)
    log = attacked.output / "logs" / name
    log.unlink(missing_ok=True)
    log.symlink_to(outside_directory / "deep" / "new.txt")
    result = thresher("train", attacked.config(resume_from_checkpoint="auto", max_steps=3))
    assert result.code == 2
    assert "is a symlink" in result.text
    assert content_of(outside_directory) == before


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        *((name, True) for name in ("a", "a/b.safetensors", "shards/00000.arrow", "a..b", "...", ".hidden")),
        *(
            (name, False)
            for name in ("", ".", "..", "../a", "a/../../b", "a/..", "/a", "\0", "C:\\a", "//h/a", 5, None)
        ),
    ],
)
def test_safe_relative_paths_stay_below_their_directory(name: object, expected: bool) -> None:
    assert is_safe_relative_path(name) == expected


def test_no_manifest_can_be_made_for_a_checkpoint_with_symlinks(attacked: Run) -> None:
    (attacked.checkpoint / "deep").symlink_to("/etc")
    with pytest.raises(UserError, match="is a symlink"):
        update_manifest(attacked.checkpoint)
