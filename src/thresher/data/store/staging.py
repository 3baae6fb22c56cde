"""The hidden directory beside an output in which it is made, so that the output appears by one rename.

One process at a time works in it. After a crash it is found again: how far the work had come, and for what. What was
begun for something else is thrown away.
"""

from __future__ import annotations

import fcntl
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
    """Take the staging directory of an output.

    fits: a digest of all that decides the bytes of the output; work is only ever continued under the same one.
    None: nothing is kept for a later process.
    state: what `save` was last told, if there is work to continue.
    """

    def __init__(self, output: Path, fits: str | None = None) -> None:
        self.output = output
        self.directory = output.parent / f".{output.name}.partial"
        self._replaced = self.directory / "replaced"
        self._fits = fits
        self._lock = self._take()
        self._restore()
        self.state: dict[str, Any] | None = self._read_state()
        if self.state is None:
            self.clear()
        self._is_worth_keeping = self.state is not None

    @property
    def content(self) -> Path:
        """The directory that becomes the output."""
        return self.directory / "content"

    def close(self, *, failed: bool) -> None:
        """Leave nothing behind but work that a later process can continue."""
        if not failed or not self._is_worth_keeping:
            shutil.rmtree(self.directory, ignore_errors=True)
        os.close(self._lock)

    def save(self, state: Mapping[str, Any]) -> None:
        """Note how far the work has come; the files that it speaks of are on disk already."""
        content = json.dumps({"fits": self._fits, "state": state})
        durable.replace(self.directory / _PROGRESS, content.encode())
        self._is_worth_keeping = self._fits is not None

    def clear(self) -> None:
        """Begin with nothing."""
        for entry in self.directory.iterdir():
            durable.remove(entry)
        self.content.mkdir()
        self.state = None
        self._is_worth_keeping = False

    def discard(self) -> None:
        """Keep nothing: whoever starts again would come to the same end."""
        self._is_worth_keeping = False

    def publish(self, *, overwrite: bool) -> None:
        """Let the output appear; an old store there is set aside first, so that no half-written one is ever seen."""
        check_output(self.output, overwrite=overwrite)
        if self.output.exists():
            self.output.rename(self._replaced)
        self.content.rename(self.output)

    def _take(self) -> int:
        self.output.parent.mkdir(parents=True, exist_ok=True)
        durable.refuse_link(self.directory)
        while True:
            self.directory.mkdir(exist_ok=True)
            try:
                lock = os.open(self.directory, os.O_RDONLY)
            except FileNotFoundError:
                continue
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
                raise UserError(
                    f"another process is writing {self.output}; wait for it, or name another directory"
                ) from None
            # its last owner may have removed the directory between our two calls
            if self.directory.exists() and os.fstat(lock).st_ino == self.directory.stat().st_ino:
                return lock
            os.close(lock)

    def _restore(self) -> None:
        """Put back an old store if a crash came between the two renames of `publish`."""
        if self._replaced.exists() and not self.output.exists():
            self._replaced.rename(self.output)

    def _read_state(self) -> dict[str, Any] | None:
        try:
            found = json.loads((self.directory / _PROGRESS).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        is_ours = self._fits is not None and found["fits"] == self._fits and self.content.is_dir()
        return found["state"] if is_ours else None


def open_at(path: Path, size: int) -> BinaryIO:
    """Open a file for writing after its first `size` bytes."""
    stream = path.open("ab")
    stream.truncate(size)
    return stream


def check_output(output: Path, *, overwrite: bool) -> None:
    """Refuse an output directory that exists, unless it is a store that may be overwritten."""
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return
    if not overwrite:
        raise UserError(f"{output} exists already; name another directory, or pass --overwrite if it is an old store")
    if not (output / "manifest.json").is_file():
        raise UserError(f"{output} is no pair store and is not overwritten; name another directory")
