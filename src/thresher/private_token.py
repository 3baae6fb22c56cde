"""Random tokens in files that only their owner can read; processes of one user prove by them that they are that."""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from pathlib import Path


def ensure_token(path: Path) -> None:
    """Create the file for this user alone if there is none; restrict an existing one that others may read.

    Processes that call this at the same time find the same token, also on several nodes that share the directory.
    """
    path.parent.mkdir(exist_ok=True)
    if not path.exists():
        with tempfile.NamedTemporaryFile("w", dir=path.parent) as file:  # its mode is 0600
            file.write(secrets.token_hex(32))
            file.flush()
            with contextlib.suppress(FileExistsError):  # another process has just created it
                os.link(file.name, path)
    if path.stat().st_uid == os.getuid() and path.stat().st_mode & 0o077:
        path.chmod(0o600)
