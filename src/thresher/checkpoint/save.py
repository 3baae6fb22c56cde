"""Staging of one checkpoint: all processes write into a directory, and rank 0 publishes it by one rename.

Decides names and the order of disk operations; the content of the files is left to the caller.

If the step already has a checkpoint, the new one replaces it: it belongs to the current run, and was just hashed, while
to trust the old one would need to read it all. A directory cannot be replaced by one rename, so the old one is renamed
first; `recover` restores it after a crash in between.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeAlias

from thresher import durable
from thresher.checkpoint.manifest import FileRecord, Manifest, list_files, record_files, write_manifest
from thresher.errors import CheckpointError

_STEP = re.compile(r"step-(\d{8,})")
_STAGING = ".staging-"
_REPLACED = ".replaced-"
_DELETED = ".deleted-"
_LOCK = ".lock"
# writes this process's files into a directory and returns their names
Write: TypeAlias = Callable[[Path], Sequence[str]]


@dataclass(frozen=True)
class Staging:
    """A directory that a save writes into; the lock marks it as in use until the save or its process ends."""

    path: Path
    step: int
    lock: BinaryIO


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def step_of(path: Path) -> int | None:
    """Parse the step from a directory name; None for other names."""
    match = _STEP.fullmatch(path.name)
    return int(match[1]) if match else None


def create_staging(root: Path, step: int) -> Staging:
    """Create a directory that only this save uses."""
    if step < 0:
        raise ValueError(f"a step must not be negative, got {step}")
    with translate_save_errors(root, step):
        root.mkdir(parents=True, exist_ok=True)
        while True:
            path = root / f"{_STAGING}{step_name(step)}-{secrets.token_hex(6)}"
            lock = _lock_path(path).open("wb")
            durable.lock(lock.fileno(), wait=True)
            # another process's `recover` may have removed the lock file before the lock was taken; then create another
            if durable.is_open_file(_lock_path(path), lock.fileno()):
                break
            lock.close()
        try:
            path.mkdir()
        except BaseException:
            _release(path, lock)
            raise
        return Staging(path, step, lock)


def publish(
    staging: Staging, *, metrics: Mapping[str, float] | None = None, records: Mapping[str, FileRecord] | None = None
) -> Path:
    """Turn a staging directory into the checkpoint of its step and return the path.

    Each rank has flushed its files and passes its `record_files`; files without a record are flushed and digested here.
    On failure the staging directory is removed and older checkpoints are unchanged.
    """
    root = staging.path.parent
    target = root / step_name(staging.step)
    try:
        with translate_save_errors(root, staging.step):
            names = list_files(staging.path)
            known = dict(records or {})
            if missing := sorted(known.keys() - set(names)):
                problem = f"rank 0 cannot see {', '.join(missing)} in {staging.path}"
                raise CheckpointError(f"{problem}; all ranks must save to one shared file system")
            own = [name for name in names if name not in known]
            for name in own:
                durable.sync_file(staging.path / name)
            known |= record_files(staging.path, own)
            write_manifest(staging.path, Manifest(staging.step, known, metrics or {}))
            for directory in {staging.path, *(path.parent for path in map(staging.path.joinpath, names))}:
                durable.sync_directory(directory)
            _replace(staging.path, target)
            durable.sync_directory(root)
    finally:
        discard(staging)
    return target


def discard(staging: Staging) -> None:
    """Remove a staging directory, unless it was published, and release its lock."""
    shutil.rmtree(staging.path, ignore_errors=True)
    _release(staging.path, staging.lock)


def recover(root: Path) -> list[str]:
    """Remove the files that killed processes left below `root`, except those in use; return what was done."""
    if not root.is_dir():
        return []
    done = []
    for path in sorted(root.glob(f"{_REPLACED}*")):
        # `.replaced-step-00000123-<unique>`: a crash between the two renames of `_replace`, or after them
        target = root / path.name.removeprefix(_REPLACED).rpartition("-")[0]
        if any(_is_locked(each) for each in root.glob(f"{_STAGING}{target.name}-*{_LOCK}")):
            continue
        if target.exists():
            durable.remove(path, is_shared=True)
        else:
            path.rename(target)
            done.append(f"restored {target.name}: a save of the same step was interrupted")
    for path in sorted(root.glob(f"{_STAGING}*{_LOCK}")):
        # a lock file without its directory: a crash right after publishing, or before the directory was created
        if not path.with_name(path.name.removesuffix(_LOCK)).exists() and not _is_locked(path):
            path.unlink(missing_ok=True)
    for path in sorted(root.glob(f"{_STAGING}*")):
        if path.is_dir() and not _is_locked(_lock_path(path)):
            durable.remove(path)
            _lock_path(path).unlink(missing_ok=True)
            done.append(f"removed {path.name}: its save was interrupted")
    for path in sorted(root.glob(f"{_DELETED}*")):
        durable.remove(path, is_shared=True)
    durable.sync_directory(root)
    return done


def delete(path: Path) -> None:
    """Delete a checkpoint; a crash in between leaves no partial one."""
    hidden = path.with_name(f"{_DELETED}{path.name}-{secrets.token_hex(6)}")
    path.rename(hidden)
    durable.sync_directory(path.parent)
    durable.remove(hidden)


def _replace(source: Path, target: Path) -> None:
    if not os.path.lexists(target):
        source.rename(target)
        return
    old = target.with_name(f"{_REPLACED}{target.name}-{secrets.token_hex(6)}")
    target.rename(old)
    try:
        source.rename(target)
    except OSError:
        old.rename(target)
        raise
    durable.sync_directory(target.parent)
    durable.remove(old)


def _lock_path(path: Path) -> Path:
    return path.with_name(path.name + _LOCK)


def _release(path: Path, lock: BinaryIO) -> None:
    with contextlib.suppress(OSError):
        _lock_path(path).unlink(missing_ok=True)
    lock.close()


def _is_locked(path: Path) -> bool:
    try:
        with path.open("rb+") as lock:
            return not durable.lock(lock.fileno())
    except FileNotFoundError:
        return False


def translate_save_errors(root: Path, step: int) -> AbstractContextManager[None]:
    """Turn an OSError into a message that names the step and says what to do."""
    return durable.translate_os_errors(
        f"could not save the checkpoint of step {step} in {root}",
        if_full="free some space there or keep fewer checkpoints",
        also=". Older checkpoints are intact",
        kind=CheckpointError,
    )
