"""How a checkpoint comes to be: written into a staging directory, published by one rename.

Decides names and the order of disk operations; what the files hold is left to the caller. Several ranks may
write into one staging directory: rank 0 calls `create_staging`, all write, and after a barrier rank 0 calls
`publish`.

Saving a step that exists already: if the old checkpoint verifies and its manifest is the same, it is kept and
the new copy dropped (a resumed run saves the same bytes again); otherwise the new one takes its place,
because it belongs to the run that goes on. Directories cannot be replaced by one rename, so the old one is
first moved aside; `recover` moves it back after a crash in between.
"""

import contextlib
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from thresher import durable
from thresher.checkpoint.manifest import (
    MANIFEST_NAME,
    FileRecord,
    Manifest,
    list_files,
    record_files,
    verify,
    write_manifest,
)
from thresher.errors import CheckpointError

_STEP = re.compile(r"step-(\d{8,})")
_STAGING = ".staging-"
_REPLACED = ".replaced-"
_DELETED = ".deleted-"
_LOCK = ".lock"


@dataclass(frozen=True)
class Staging:
    """A directory that is being filled; its lock says so to other processes, until this one lets go or dies."""

    path: Path
    root: Path
    step: int
    lock: BinaryIO


def step_name(step: int) -> str:
    """Name the directory of a step."""
    return f"step-{step:08d}"


def step_of(path: Path) -> int | None:
    """Read the step from a directory's name; None for other names."""
    match = _STEP.fullmatch(path.name)
    return int(match[1]) if match else None


def create_staging(root: Path, step: int) -> Staging:
    """Make a directory that only this save uses."""
    if step < 0:
        raise ValueError(f"a step is not negative, got {step}")
    with readable_errors(root, step):
        root.mkdir(parents=True, exist_ok=True)
        while True:
            path = root / f"{_STAGING}{step_name(step)}-{secrets.token_hex(6)}"
            lock = _lock_path(path).open("wb")
            fcntl.flock(lock, fcntl.LOCK_EX)
            # `recover` of another process may have removed the lock file before we held it; then nobody would
            # see it.
            if os.fstat(lock.fileno()).st_nlink:
                break
            lock.close()
        try:
            path.mkdir()
        except BaseException:
            _release(path, lock)
            raise
        return Staging(path, root, step, lock)


def publish(
    staging: Staging,
    *,
    metrics: Mapping[str, float] | None = None,
    records: Mapping[str, FileRecord] | None = None,
) -> Path:
    """Make a filled staging directory the checkpoint of its step and return where it is.

    `records` are digests that ranks have taken of their own files with `record_files`; files without one are
    digested here. On failure the staging directory is removed, and every older checkpoint is as it was.
    """
    target = staging.root / step_name(staging.step)
    try:
        with readable_errors(staging.root, staging.step):
            names = list_files(staging.path)
            known = dict(records or {})
            if absent := sorted(known.keys() - set(names)):
                raise CheckpointError(
                    f"rank 0 cannot see {', '.join(absent)} in {staging.path}; "
                    "all ranks must save to one shared file system"
                )
            _sync_tree(staging.path)
            known |= record_files(staging.path, [name for name in names if name not in known])
            write_manifest(staging.path, Manifest(staging.step, known, metrics or {}))
            durable.sync_directory(staging.path)
            if not _is_same_checkpoint(staging.path, target):
                _move_in(staging.path, target)
            durable.sync_directory(staging.root)
    finally:
        discard(staging)
    return target


def discard(staging: Staging) -> None:
    """Remove a staging directory (if it was not published) and let go of its lock."""
    shutil.rmtree(staging.path, ignore_errors=True)
    _release(staging.path, staging.lock)


def recover(root: Path) -> list[str]:
    """Clear away what a killed process left below `root`, sparing what a live one uses; say what was done."""
    if not root.is_dir():
        return []
    done = []
    for path in sorted(root.glob(f"{_REPLACED}*")):
        # `.replaced-step-00000123-<unique>`: the crash came between the two renames of `_move_in`, or after
        # them.
        target = root / path.name.removeprefix(_REPLACED).rpartition("-")[0]
        if _staging_in_use(root, target.name):
            continue
        if target.exists():
            durable.remove(path, is_shared=True)
        else:
            path.rename(target)
            done.append(f"moved {target.name} back: a save of the same step was cut off")
    for path in sorted(root.glob(f"{_STAGING}*{_LOCK}")):
        # A lock file without its directory: the crash came right after the publication, or before the first
        # write.
        if not path.with_name(path.name.removesuffix(_LOCK)).exists() and not _is_locked(path):
            path.unlink(missing_ok=True)
    for path in sorted(root.glob(f"{_STAGING}*")):
        if path.is_dir() and not _is_locked(_lock_path(path)):
            durable.remove(path)
            _lock_path(path).unlink(missing_ok=True)
            done.append(f"removed {path.name}: its save was cut off")
    for path in sorted(root.glob(f"{_DELETED}*")):
        durable.remove(path, is_shared=True)
    durable.sync_directory(root)
    return done


def delete(path: Path) -> None:
    """Delete a checkpoint so that a crash on the way leaves no torn one."""
    hidden = path.with_name(f"{_DELETED}{path.name}-{secrets.token_hex(6)}")
    path.rename(hidden)
    durable.sync_directory(path.parent)
    durable.remove(hidden)


def _move_in(source: Path, target: Path) -> None:
    if not os.path.lexists(target):
        source.rename(target)
        return
    aside = target.with_name(f"{_REPLACED}{target.name}-{secrets.token_hex(6)}")
    target.rename(aside)
    try:
        source.rename(target)
    except OSError:
        aside.rename(target)
        raise
    durable.sync_directory(target.parent)
    durable.remove(aside)


def _is_same_checkpoint(new: Path, old: Path) -> bool:
    if not old.exists() or old.is_symlink():
        return False
    try:
        verify(old)
    except CheckpointError:
        return False
    return (new / MANIFEST_NAME).read_bytes() == (old / MANIFEST_NAME).read_bytes()


def _sync_tree(root: Path) -> None:
    for directory, _, names in os.walk(root):
        for name in names:
            durable.sync_file(Path(directory, name))
        durable.sync_directory(Path(directory))


def _lock_path(path: Path) -> Path:
    return path.with_name(path.name + _LOCK)


def _release(path: Path, lock: BinaryIO) -> None:
    with contextlib.suppress(OSError):
        _lock_path(path).unlink(missing_ok=True)
    lock.close()


def _is_locked(path: Path) -> bool:
    try:
        lock = path.open("rb+")
    except FileNotFoundError:
        return False
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _staging_in_use(root: Path, name: str) -> bool:
    return any(_is_locked(path) for path in root.glob(f"{_STAGING}{name}-*{_LOCK}"))


def readable_errors(root: Path, step: int) -> AbstractContextManager[None]:
    """Say of an error of the disk what could not be saved, and what to do."""
    return durable.translate_os_errors(
        f"could not save the checkpoint of step {step} in {root}",
        if_full="free some space there or keep fewer checkpoints",
        also=". Older checkpoints are unharmed",
        kind=CheckpointError,
    )
