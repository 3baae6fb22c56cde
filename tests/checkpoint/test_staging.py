"""A checkpoint is published completely or not at all, and damage is detected."""

import errno
import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import pytest

from tests.support.flushes import record_flushed_inodes
from tests.support.staged import staging
from thresher import durable
from thresher.checkpoint.manager import latest
from thresher.checkpoint.manifest import read_manifest, record_files, verify
from thresher.checkpoint.save import create_staging, discard, publish, recover
from thresher.errors import CheckpointError


def save(root: Path, step: int, content: bytes = b"weights", **metrics: float) -> Path:
    with staging(root, step, metrics=metrics) as directory:
        (directory / "model.bin").write_bytes(content)
        (directory / "rank-0").mkdir()
        (directory / "rank-0" / "state.bin").write_bytes(b"state of rank 0")
    return root / f"step-{step:08d}"


def snapshot(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


def test_a_published_checkpoint_verifies_and_lists_sizes_and_digests(tmp_path: Path) -> None:
    path = save(tmp_path, 123, loss=0.25)
    manifest = verify(path)
    assert path.name == "step-00000123"
    assert manifest.step == 123
    assert manifest.metrics == {"loss": 0.25}
    assert list(manifest.files) == ["model.bin", "rank-0/state.bin"]
    assert manifest.files["model.bin"].size == 7
    assert manifest.files["model.bin"].sha256 == hashlib.sha256(b"weights").hexdigest()
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000123"]


def test_saving_the_same_state_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    first, second = save(tmp_path / "a", 7, loss=0.1), save(tmp_path / "b", 7, loss=0.1)
    assert snapshot(first) == snapshot(second)


def test_a_link_to_the_same_checkpoint_is_replaced_by_the_checkpoint(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    elsewhere = tmp_path / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    saved = save(tmp_path, 1)
    assert not saved.is_symlink()
    assert snapshot(saved) == snapshot(elsewhere)


def test_every_file_is_flushed_to_the_disk_before_a_checkpoint_is_visible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed = record_flushed_inodes(monkeypatch)
    path = save(tmp_path, 1)
    assert {file.name for file in (path, *path.rglob("*")) if file.stat().st_ino not in flushed} == set()


def test_an_exception_while_writing_leaves_nothing(tmp_path: Path) -> None:
    def fail_halfway() -> None:
        with staging(tmp_path, 1) as directory:
            (directory / "half").write_bytes(b"x")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_halfway()
    assert list(tmp_path.iterdir()) == []


def test_a_step_that_is_saved_again_replaces_its_checkpoint_without_reading_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(tmp_path, 5)
    digested: list[str] = []
    file_digest = hashlib.file_digest

    def recorded(file: BinaryIO, name: str) -> object:
        digested.append(Path(file.name).relative_to(tmp_path).parts[0])
        return file_digest(file, name)

    monkeypatch.setattr(hashlib, "file_digest", recorded)
    assert save(tmp_path, 5) == path
    assert len(digested) == 2
    assert all(name.startswith(".staging-") for name in digested)
    monkeypatch.undo()
    verify(path)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000005"]


@pytest.mark.parametrize("damage", [None, b"torn", b"NEW"], ids=["different", "torn", "of the same size"])
def test_a_different_or_damaged_checkpoint_of_the_same_step_is_replaced(tmp_path: Path, damage: bytes | None) -> None:
    path = save(tmp_path, 5, b"old" if damage is None else b"new")
    if damage is not None:
        (path / "model.bin").write_bytes(damage)
    save(tmp_path, 5, b"new")
    verify(path)
    assert (path / "model.bin").read_bytes() == b"new"
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000005"]


def test_several_writers_share_one_staging_directory(tmp_path: Path) -> None:
    stage = create_staging(tmp_path, 9)
    records = {}
    for rank in range(3):
        name = f"rank-{rank}.bin"
        (stage.path / name).write_bytes(bytes([rank]) * 10)
        records |= record_files(stage.path, [name])
    (stage.path / "shared.bin").write_bytes(b"shared")
    path = publish(stage, records=records)
    assert list(verify(path).files) == ["rank-0.bin", "rank-1.bin", "rank-2.bin", "shared.bin"]


def test_rank_0_flushes_only_its_own_files_and_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = create_staging(tmp_path, 9)
    for name in ("of-rank-1", "of-rank-0"):
        (stage.path / name).write_bytes(b"x")
    records = record_files(stage.path, ["of-rank-1"])
    flushed = record_flushed_inodes(monkeypatch)
    path = publish(stage, records=records)
    inodes = {file.name: file.stat().st_ino for file in (path, *path.iterdir())}
    assert {name for name, inode in inodes.items() if inode in flushed} == {path.name, "of-rank-0", "manifest.json"}


def test_publishing_fails_if_rank_0_cannot_see_a_file(tmp_path: Path) -> None:
    stage = create_staging(tmp_path, 9)
    (stage.path / "rank-1.bin").write_bytes(b"x")
    records = record_files(stage.path, ["rank-1.bin"])
    (stage.path / "rank-1.bin").unlink()
    with pytest.raises(CheckpointError, match=r"cannot see rank-1\.bin.*shared file system"):
        publish(stage, records=records)
    assert list(tmp_path.iterdir()) == []


def truncate(path: Path) -> None:
    os.truncate(path / "model.bin", 3)


def flip_a_bit(path: Path) -> None:
    data = bytearray((path / "model.bin").read_bytes())
    data[2] ^= 1
    (path / "model.bin").write_bytes(bytes(data))


def remove_a_file(path: Path) -> None:
    (path / "rank-0" / "state.bin").unlink()


def add_a_pickle(path: Path) -> None:
    (path / "optimizer.pt").write_bytes(b"\x80\x04cos\nabort\n(tR.")


def flip_a_digit_of_the_manifest(path: Path) -> None:
    text = (path / "manifest.json").read_text()
    (path / "manifest.json").write_text(text.replace("0.25", "0.24"))


def cut_the_manifest(path: Path) -> None:
    os.truncate(path / "manifest.json", 40)


def remove_the_manifest(path: Path) -> None:
    (path / "manifest.json").unlink()


def link_a_file(path: Path) -> None:
    (path / "link").symlink_to("model.bin")


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (truncate, r"model\.bin has 3 bytes instead of 7"),
        (flip_a_bit, r"model\.bin does not match its digest"),
        (remove_a_file, r"rank-0/state\.bin is missing"),
        (add_a_pickle, r"optimizer\.pt is not in the manifest"),
        (flip_a_digit_of_the_manifest, r"manifest\.json was modified"),
        (cut_the_manifest, r"manifest\.json is not valid JSON"),
        (remove_the_manifest, r"no manifest\.json"),
        (link_a_file, r"link is a symlink"),
    ],
)
def test_a_damaged_checkpoint_is_reported_and_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], None], problem: str
) -> None:
    good, bad = save(tmp_path, 1, loss=0.25), save(tmp_path, 2, loss=0.25)
    damage(bad)
    with pytest.raises(CheckpointError, match=problem):
        verify(bad)
    assert latest(tmp_path) == good
    (reason,) = caplog.messages
    assert "step-00000002" in reason


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    truncate(path)
    remove_a_file(path)
    with pytest.raises(CheckpointError, match=r"state\.bin is missing; model\.bin has 3 bytes"):
        verify(path)


def test_a_manifest_of_another_format_names_the_version_to_use(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    text = (path / "manifest.json").read_text()
    (path / "manifest.json").write_text(text.replace('"format": 1', '"format": 2'))
    with pytest.raises(CheckpointError, match=r"format 2.*resume with the version that wrote it"):
        read_manifest(path)


def test_a_checkpoint_with_another_steps_name_is_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    good = save(tmp_path, 1)
    save(tmp_path, 2).rename(tmp_path / "step-00000003")
    assert latest(tmp_path) == good
    assert "contains step 2" in caplog.messages[0]


def test_a_full_disk_is_a_clear_error_and_older_checkpoints_are_intact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = save(tmp_path, 1)
    before = snapshot(good)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(CheckpointError, match=r"step 2.*No space left.*free some space.*intact"):
            save(tmp_path, 2)
    with pytest.raises(CheckpointError, match="No space left"), staging(tmp_path, 2):
        full()
    assert latest(tmp_path) == good
    assert snapshot(good) == before
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]


def test_a_failed_replacement_restores_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path, 1, b"old")
    rename = Path.rename

    def fail_for_staging(self: Path, target: Path) -> Path:
        if self.name.startswith(".staging-"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail_for_staging)
    with pytest.raises(CheckpointError, match="step 1"):
        save(tmp_path, 1, b"new")
    verify(path)
    assert (path / "model.bin").read_bytes() == b"old"


def test_recover_keeps_a_staging_directory_in_use(tmp_path: Path) -> None:
    stage = create_staging(tmp_path, 4)
    (stage.path / "model.bin").write_bytes(b"x")
    assert recover(tmp_path) == []
    verify(publish(stage))


def test_recover_leaves_a_checkpoint_alone_that_a_save_is_replacing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(tmp_path, 4, b"old")
    rename = Path.rename
    done: list[list[str]] = []

    def recover_between_renames(self: Path, target: Path) -> Path:
        if self.name.startswith(".staging-"):
            done.append(recover(tmp_path))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", recover_between_renames)
    save(tmp_path, 4, b"new")
    assert done == [[]]
    verify(path)
    assert (path / "model.bin").read_bytes() == b"new"
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000004"]


def test_recover_removes_the_files_of_a_killed_save(tmp_path: Path) -> None:
    stage = create_staging(tmp_path, 4)
    stage.lock.close()  # as when the process dies
    (done,) = recover(tmp_path)
    assert stage.path.name in done
    assert list(tmp_path.iterdir()) == []


def test_recover_on_a_root_that_does_not_exist_does_nothing(tmp_path: Path) -> None:
    assert recover(tmp_path / "no") == []


def test_recover_leaves_other_files_alone(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("{}")
    (tmp_path / "notes").mkdir()
    save(tmp_path, 1)
    recover(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["metrics.jsonl", "notes", "step-00000001"]


def test_discard_leaves_nothing(tmp_path: Path) -> None:
    discard(create_staging(tmp_path, 4))
    assert list(tmp_path.iterdir()) == []


def test_a_copied_checkpoint_verifies_elsewhere(tmp_path: Path) -> None:
    shutil.copytree(save(tmp_path, 1), tmp_path / "elsewhere" / "my-copy")
    assert verify(tmp_path / "elsewhere" / "my-copy").step == 1


def test_recovery_works_while_another_process_removes_the_same_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("step-00000001", ".replaced-step-00000001-ab", ".deleted-step-00000002-cd"):
        (tmp_path / name).mkdir()
    remove = durable.remove

    def remove_second(path: Path, **options: bool) -> None:
        shutil.rmtree(path)  # by the other process
        remove(path, **options)

    monkeypatch.setattr(durable, "remove", remove_second)
    assert recover(tmp_path) == []
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
