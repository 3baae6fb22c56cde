"""Which checkpoint a run resumes from, and which ones are kept."""

import math
from pathlib import Path

import pytest

from tests.support.staged import staging
from thresher.checkpoint.manager import DamagedCheckpoints, best, latest, list_checkpoints, prune, resolve_resume
from thresher.errors import CheckpointError


def save(root: Path, step: int, **metrics: float) -> Path:
    with staging(root, step, metrics=metrics) as directory:
        (directory / "model.bin").write_bytes(b"%d" % step)
    return root / f"step-{step:08d}"


def damage(path: Path) -> None:
    (path / "model.bin").write_bytes(b"?")


def steps(root: Path) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in list_checkpoints(root)]


def test_order_is_by_step_not_by_text(tmp_path: Path) -> None:
    for step in (999_999_999, 5, 100_000_000):
        save(tmp_path, step)
    assert steps(tmp_path) == [5, 100_000_000, 999_999_999]


def test_auto_finds_the_newest_valid_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tmp_path, 1)
    good = save(tmp_path, 2)
    damage(save(tmp_path, 3))
    assert resolve_resume("auto", tmp_path) == good
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_a_step_that_is_saved_again_over_a_damaged_checkpoint_is_resumed_from(tmp_path: Path) -> None:
    """The ranks have found the damage; the driver, which checks sizes, would not see it."""
    older, newer = save(tmp_path, 2), save(tmp_path, 3)
    damage(newer)
    damaged = DamagedCheckpoints()
    damaged.add(newer, CheckpointError("model.bin does not match its digest"))
    assert latest(tmp_path, digests=False, damaged=damaged) == older
    with pytest.raises(CheckpointError, match="does not match its digest"):
        resolve_resume(str(newer), tmp_path, digests=False, damaged=damaged)
    save(tmp_path, 3)
    assert latest(tmp_path, digests=False, damaged=damaged) == newer
    assert resolve_resume(str(newer), tmp_path, digests=False, damaged=damaged) == newer


@pytest.mark.parametrize("value", ["auto", False])
def test_a_root_that_does_not_exist_yet_has_no_checkpoint(tmp_path: Path, value: str | bool) -> None:
    assert resolve_resume(value, tmp_path / "later") is None
    assert latest(tmp_path / "later") is None


def test_false_ignores_checkpoints(tmp_path: Path) -> None:
    save(tmp_path, 1)
    assert resolve_resume(False, tmp_path) is None


def test_a_path_is_verified(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    assert resolve_resume(str(path), tmp_path / "other") == path
    damage(path)
    with pytest.raises(CheckpointError, match=r"model\.bin does not match its digest"):
        resolve_resume(str(path), tmp_path)


def test_a_path_that_is_missing_or_one_level_too_high_is_reported_with_a_hint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no checkpoint at .*check the path"):
        resolve_resume(str(tmp_path / "step-00000009"), tmp_path)
    save(tmp_path, 3)
    with pytest.raises(CheckpointError, match=r"did you mean .*step-00000003\?"):
        resolve_resume(str(tmp_path), tmp_path)


def test_best_is_found_from_the_manifests(tmp_path: Path) -> None:
    for step, loss in ((1, 0.5), (2, 0.3), (3, 0.3), (4, math.nan), (5, 0.4)):
        save(tmp_path, step, loss=loss)
    save(tmp_path, 6)
    assert best(tmp_path, "loss", higher_is_better=False) == tmp_path / "step-00000002"
    assert best(tmp_path, "loss", higher_is_better=True) == tmp_path / "step-00000001"
    assert best(tmp_path, "accuracy", higher_is_better=True) is None


def test_prune_keeps_the_last_ones_and_the_best(tmp_path: Path) -> None:
    for step, loss in ((1, 0.5), (2, 0.3), (3, 0.6), (4, 0.4), (5, 0.7)):
        save(tmp_path, step, loss=loss)
    deleted = prune(tmp_path, 2, best(tmp_path, "loss", higher_is_better=False))
    assert [path.name for path in deleted] == ["step-00000001", "step-00000003"]
    assert steps(tmp_path) == [2, 4, 5]
    assert prune(tmp_path, 2, tmp_path / "step-00000002") == []
    assert len(list(tmp_path.iterdir())) == 3


def test_prune_never_deletes_the_only_valid_checkpoint(tmp_path: Path) -> None:
    for step in range(1, 5):
        save(tmp_path, step)
    for step in (1, 3, 4):
        damage(tmp_path / f"step-{step:08d}")
    prune(tmp_path, 1)
    assert steps(tmp_path) == [2, 4]
    assert latest(tmp_path) == tmp_path / "step-00000002"


def test_prune_keeps_the_published_checkpoint_if_newer_ones_are_damaged(tmp_path: Path) -> None:
    """A run that resumed from step 10, because the later ones are damaged, has saved step 15."""
    for step in (10, 20, 30):
        save(tmp_path, step)
    for step in (20, 30):
        damage(tmp_path / f"step-{step:08d}")
    published = save(tmp_path, 15)
    prune(tmp_path, keep_last=2, trusted=published)
    assert steps(tmp_path) == [15, 20, 30]
    assert latest(tmp_path) == published


def test_prune_does_not_read_a_trusted_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in range(1, 4):
        save(tmp_path, step)

    def fail_if_read(path: Path) -> str | None:
        raise AssertionError(f"{path} was read")

    monkeypatch.setattr("thresher.checkpoint.manager._invalid_reason", fail_if_read)
    prune(tmp_path, 1, trusted=tmp_path / "step-00000003")
    assert steps(tmp_path) == [3]


def test_keeping_no_checkpoint_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least one"):
        prune(tmp_path, 0)
