"""Staging directory of a store: a hidden directory beside the output, renamed into place when it is complete.

A lock admits one process at a time. After a crash, a process with the same fingerprint continues from the saved
state; work with another fingerprint is deleted.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from thresher import durable
from thresher.errors import UserError

_PROGRESS = "progress.json"


class Staging:
    """The locked staging directory of an output.

    fingerprint: digest of everything that determines the bytes of the output; None disables resuming.
    state: the last argument of `save` if there is work to resume, else None.
    """

    def __init__(self, output: Path, fingerprint: str | None = None) -> None:
        self.output = output
        self.directory = output.parent / f".{output.name}.partial"
        self._replaced = self.directory / "replaced"
        self._fingerprint = fingerprint
        self._lock = self._acquire()
        self._restore()
        self.state: dict[str, Any] | None = self._read_state()
        if self.state is None:
            self.clear()
        self._is_resumable = self.state is not None

    @property
    def content(self) -> Path:
        """The directory that becomes the output."""
        return self.directory / "content"

    def close(self, *, failed: bool) -> None:
        """Release the lock; delete everything except work that a later process can resume."""
        if not failed or not self._is_resumable:
            shutil.rmtree(self.directory, ignore_errors=True)
        os.close(self._lock)

    def save(self, state: Mapping[str, Any]) -> None:
        """Record the progress; the files that `state` describes must already be flushed to the disk."""
        content = json.dumps({"fits": self._fingerprint, "state": state})
        durable.replace(self.directory / _PROGRESS, content.encode())
        self._is_resumable = self._fingerprint is not None

    def clear(self) -> None:
        """Delete all staged work."""
        for entry in self.directory.iterdir():
            durable.remove(entry)
        self.content.mkdir()
        self.state = None
        self._is_resumable = False

    def discard(self) -> None:
        """Delete staged work on close: a resumed run would fail in the same way."""
        self._is_resumable = False

    def publish(self, *, overwrite: bool) -> None:
        """Rename the content to the output; an old store is moved aside first, so no partial one is ever visible."""
        check_output(self.output, overwrite=overwrite)
        if self.output.exists():
            self.output.rename(self._replaced)
        self.content.rename(self.output)

    def _acquire(self) -> int:
        self.output.parent.mkdir(parents=True, exist_ok=True)
        durable.refuse_link(self.directory)
        while True:
            self.directory.mkdir(exist_ok=True)
            try:
                lock = os.open(self.directory, os.O_RDONLY)
            except FileNotFoundError:
                continue
            if not durable.lock(lock):
                os.close(lock)
                raise UserError(f"another process is writing {self.output}; wait for it, or choose another directory")
            if durable.is_open_file(self.directory, lock):
                return lock
            os.close(lock)

    def _restore(self) -> None:
        """Restore the old store after a crash between the two renames of `publish`."""
        if self._replaced.exists() and not self.output.exists():
            self._replaced.rename(self.output)

    def _read_state(self) -> dict[str, Any] | None:
        try:
            found = json.loads((self.directory / _PROGRESS).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        matches = self._fingerprint is not None and found["fits"] == self._fingerprint and self.content.is_dir()
        return found["state"] if matches else None


def open_at(path: Path, size: int) -> BinaryIO:
    """Truncate a file to `size` bytes and open it for appending."""
    stream = path.open("ab")
    stream.truncate(size)
    return stream


def quarantine_file(store: Path) -> Path:
    """Return the file beside a store with the rows that were rejected."""
    return store.with_name(f"{store.name}.quarantine.jsonl")


def check_output(output: Path, *, overwrite: bool) -> None:
    """Raise if the output directory exists, unless it is empty or a store that may be overwritten."""
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return
    if not overwrite:
        raise UserError(f"{output} already exists; choose another directory, or pass --overwrite to replace a store")
    if not (output / "manifest.json").is_file():
        raise UserError(f"{output} is not a pair store and will not be overwritten; choose another directory")
