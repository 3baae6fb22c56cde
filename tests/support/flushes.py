"""Record which files are flushed to the disk when one is renamed into place."""

from __future__ import annotations

import os
from typing import Any

import pytest


def record_flushed_inodes(patch: pytest.MonkeyPatch) -> set[int]:
    """Return a set that grows with every rename: the inodes of the files and directories flushed before it."""
    flushed: set[int] = set()
    before_rename: set[int] = set()

    def fsync(descriptor: int, original: Any = os.fsync) -> None:
        original(descriptor)
        flushed.add(os.fstat(descriptor).st_ino)

    def recorded(rename: Any) -> Any:
        def call(*paths: Any) -> None:
            before_rename.update(flushed)
            rename(*paths)

        return call

    patch.setattr(os, "fsync", fsync)
    patch.setattr(os, "rename", recorded(os.rename))
    patch.setattr(os, "replace", recorded(os.replace))
    return before_rename
