"""Nothing is written, deleted or read outside of the directories that a run was given, whatever names and links say."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.attacks import CommandLine, Run, sign
from tests.support.staged import staging
from thresher.checkpoint.retention import list_checkpoints, prune
from thresher.checkpoint.staging import recover
from thresher.errors import CheckpointError, UserError
from thresher.file_names import is_safe_relative_path


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    """A directory of somebody else's, which must stay as it is."""
    directory = tmp_path / "precious"
    (directory / "deep").mkdir(parents=True)
    (directory / "deep" / "letter.txt").write_text("mine")
    (directory / "x.damaged").write_text("mine")
    (directory / ".partial-0").write_text("mine")
    os.utime(directory / ".partial-0", (0, 0))
    return directory


def content_of(directory: Path) -> dict[str, str]:
    """What lies in a directory, links told and not followed."""
    return {
        str(path.relative_to(directory)): f"-> {path.readlink()}" if path.is_symlink() else path.read_text("latin-1")
        for path in sorted(directory.rglob("*"))
        if path.is_symlink() or path.is_file()
    }


def around(run: Run) -> dict[str, str]:
    """All that lies beside a run's directories."""
    return {
        name: content
        for name, content in content_of(run.directory.parent).items()
        if not name.startswith((f"{run.directory.name}/output", f"{run.directory.name}/cache"))
    }


@pytest.mark.parametrize("name", ["../../escaped", "/tmp/thresher-escaped", ".."])
def test_a_name_of_a_run_is_no_path(attacked: Run, thresher: CommandLine, name: str) -> None:
    shutil.rmtree(attacked.output)
    trackers = {"track_with": ["console", "tensorboard", "wandb", "mlflow"]}
    config = attacked.config(exp_name=name, tracker_kwargs={"wandb_mode": "offline"}, **trackers)
    before = around(attacked)
    assert thresher("train", config).code == 0
    assert around(attacked) == before
    assert not Path("/tmp/thresher-escaped").exists()


def test_a_name_of_a_trackers_project_is_no_path(attacked: Run, thresher: CommandLine) -> None:
    shutil.rmtree(attacked.output)
    kwargs = {"wandb_mode": "offline", "wandb_project": "../../escaped", "wandb_entity": "../../e"}
    config = attacked.config(track_with=["wandb"], tracker_kwargs=kwargs)
    before = around(attacked)
    thresher("train", config)
    assert around(attacked) == before


def test_an_id_in_the_log_that_is_gone_on_with_is_no_path(attacked: Run, thresher: CommandLine) -> None:
    (attacked.output / "logs" / "wandb_run.json").write_text('{"id": "../../../escaped", "complete_through": 0}')
    (attacked.output / "logs" / "mlflow_run.json").write_text('{"run_id": "../../../escaped"}')
    kwargs = {"wandb_mode": "offline"}
    changes: dict[str, Any] = {"resume_from_checkpoint": "auto", "max_steps": 3, "tracker_kwargs": kwargs}
    config = attacked.config(track_with=["wandb", "mlflow"], **changes)
    before = around(attacked)
    assert thresher("train", config).code == 0
    assert around(attacked) == before


@pytest.mark.parametrize("name", ["../../letter.txt", "/etc/hostname", "..", "a/../../b"])
def test_a_manifest_that_names_files_elsewhere_is_refused(attacked: Run, name: str) -> None:
    from thresher.checkpoint.manifest import FileRecord, Manifest, list_files, record_files, verify, write_manifest

    checkpoint = attacked.checkpoint
    own = record_files(checkpoint, list_files(checkpoint))
    (attacked.output / "letter.txt").write_text("mine")
    write_manifest(checkpoint, Manifest(2, own | {name: FileRecord(4, "00" * 32)}))
    with pytest.raises(CheckpointError, match="is missing"):
        verify(checkpoint)


def test_a_link_in_a_checkpoint_is_refused(
    attacked: Run, precious: Path, thresher: CommandLine, tmp_path: Path
) -> None:
    weights = attacked.checkpoint / "weights.safetensors"
    weights.rename(precious / "weights.safetensors")
    weights.symlink_to(precious / "weights.safetensors")
    ended = thresher("export", attacked.checkpoint, "--output", tmp_path / "out")
    assert ended.code == 2
    assert "is a symbolic link" in ended.text


def save(root: Path, step: int) -> Path:
    with staging(root, step) as directory:
        (directory / "state.json").write_text("{}")
    return root / f"step-{step:08d}"


def test_retention_removes_a_link_and_nothing_where_it_leads(tmp_path: Path, precious: Path) -> None:
    root = tmp_path / "checkpoints"
    before = content_of(precious)
    root.mkdir()
    (root / "step-00000001").symlink_to(precious)
    save(root, 2)
    save(root, 3)
    prune(root, 1)
    assert [path.name for path in list_checkpoints(root)] == ["step-00000003"]
    assert content_of(precious) == before
    assert not list(root.glob(".deleted-*"))


def test_a_save_over_a_link_replaces_the_link(tmp_path: Path, precious: Path) -> None:
    root = tmp_path / "checkpoints"
    root.mkdir()
    before = content_of(precious)
    for step, target in ((1, precious), (2, tmp_path / "nowhere")):
        (root / f"step-{step:08d}").symlink_to(target)
        assert not save(root, step).is_symlink()
    assert content_of(precious) == before
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("name", [".deleted-step-00000001-a", ".staging-step-00000001-a", ".replaced-step-00000002-a"])
def test_recovery_removes_a_link_and_nothing_where_it_leads(tmp_path: Path, precious: Path, name: str) -> None:
    root = tmp_path / "checkpoints"
    save(root, 2)
    before = content_of(precious)
    (root / name).symlink_to(precious)
    recover(root)
    assert content_of(precious) == before
    assert not (root / name).is_symlink()


def test_pruning_the_cache_removes_nothing_outside_of_it(attacked: Run, precious: Path, thresher: CommandLine) -> None:
    before = content_of(precious)
    (attacked.cache / "linked").symlink_to(precious)
    (attacked.cache / ".deleted-x").symlink_to(precious)
    assert thresher("cache", "prune", "--yes", "--cache-dir", attacked.cache).code == 0
    assert content_of(precious) == before
    assert list(attacked.cache.iterdir()) == []


@pytest.mark.parametrize("identity", ["../precious", "/", ".."])
def test_an_identity_to_prune_is_no_path(attacked: Run, precious: Path, thresher: CommandLine, identity: str) -> None:
    before = content_of(precious)
    ended = thresher("cache", "prune", "--yes", "--identity", identity, "--cache-dir", attacked.cache)
    assert ended.code == 2
    assert content_of(precious) == before


@pytest.mark.parametrize("index", ["model.safetensors.index.json", "pytorch_model.bin.index.json"])
@pytest.mark.parametrize("absolute", [False, True])
def test_an_index_of_weights_that_leads_elsewhere_is_refused(
    attacked: Run, thresher: CommandLine, index: str, absolute: bool
) -> None:
    outside = attacked.directory / "model.safetensors"
    shutil.move(attacked.model / "model.safetensors", outside)
    name = str(outside) if absolute else "../model.safetensors"
    (attacked.model / index).write_text(json.dumps({"metadata": {}, "weight_map": {"lm_head.weight": name}}))
    shutil.rmtree(attacked.output)
    for verb in ("train", "score"):
        ended = thresher(verb, attacked.config())
        assert ended.code == 2
        assert "which is no file of the model" in ended.text


def test_an_index_of_weights_that_is_none_is_told(attacked: Run, thresher: CommandLine) -> None:
    (attacked.model / "model.safetensors.index.json").write_text("[1]")
    ended = thresher("export", attacked.output, "--output", attacked.directory / "out")
    assert ended.code == 2
    assert "is no index of weights" in ended.text


@pytest.mark.parametrize("name", ["../../shard.arrow", "/etc/hostname", "shards/../../x"])
def test_a_store_that_names_files_elsewhere_is_refused(attacked: Run, thresher: CommandLine, name: str) -> None:
    manifest = attacked.store / "manifest.json"
    values = json.loads(manifest.read_text())
    values["shards"][0]["name"] = name
    manifest.write_text(json.dumps(values))
    ended = thresher("inspect", attacked.store)
    assert ended.code == 2
    assert "a path outside the store" in ended.text


def test_a_saved_data_set_that_names_files_elsewhere_is_refused(
    attacked: Run, thresher: CommandLine, tmp_path: Path
) -> None:
    import datasets

    saved, other = tmp_path / "saved", tmp_path / "other"
    for place in (saved, other):
        datasets.Dataset.from_list([{"prompt": "w4 ", "chosen": "w5", "rejected": "w6"}]).save_to_disk(str(place))
    state = json.loads((saved / "state.json").read_text())
    state["_data_files"] = [{"filename": f"../other/{state['_data_files'][0]['filename']}"}]
    (saved / "state.json").write_text(json.dumps(state))
    options = ("--template", "raw", "--model", attacked.model, "--output", tmp_path / "store")
    ended = thresher("prepare", saved, *options)
    assert ended.code == 2
    assert "which is no file of it" in ended.text


def test_bad_rows_are_not_written_through_a_link(
    attacked: Run, precious: Path, thresher: CommandLine, tmp_path: Path
) -> None:
    with attacked.rows.open("a") as rows:
        rows.write("{\n")
    letter = precious / "deep" / "letter.txt"
    (tmp_path / "store.quarantine.jsonl").symlink_to(letter)
    options = ("--template", "raw", "--on-bad-row", "quarantine", "--model", attacked.model)
    assert thresher("prepare", attacked.rows, *options, "--output", tmp_path / "store").code == 0
    assert letter.read_text() == "mine"
    assert not (tmp_path / "store.quarantine.jsonl").is_symlink()


@pytest.mark.parametrize("verb", ["prepare", "export"])
def test_nothing_is_made_or_cleared_away_through_a_link(
    attacked: Run, precious: Path, thresher: CommandLine, tmp_path: Path, verb: str
) -> None:
    before = content_of(precious)
    (tmp_path / ".out.partial").symlink_to(precious)
    source = (
        (attacked.rows, "--template", "raw", "--model", attacked.model) if verb == "prepare" else (attacked.output,)
    )
    ended = thresher(verb, *source, "--output", tmp_path / "out")
    assert ended.code == 2
    assert "is a link" in ended.text
    assert content_of(precious) == before


@pytest.mark.parametrize("name", ["metrics.jsonl", ".metrics.jsonl.new", "mlflow_run.json", "tensorboard"])
def test_logs_are_not_written_through_a_link(attacked: Run, precious: Path, thresher: CommandLine, name: str) -> None:
    before = content_of(precious)
    log = attacked.output / "logs" / name
    log.unlink(missing_ok=True)
    log.symlink_to(precious / "deep" / "new.txt")
    ended = thresher("train", attacked.config(resume_from_checkpoint="auto", max_steps=3))
    assert ended.code == 2
    assert "is a link" in ended.text
    assert content_of(precious) == before


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
def test_a_name_stays_within_or_does_not(name: object, expected: bool) -> None:
    assert is_safe_relative_path(name) == expected


def test_a_checkpoint_signed_by_anybody_is_still_one_of_plain_files(attacked: Run) -> None:
    (attacked.checkpoint / "deep").symlink_to("/etc")
    with pytest.raises(UserError, match="is a symbolic link"):
        sign(attacked.checkpoint)
