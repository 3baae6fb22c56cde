"""Digests of model files, remembered by path, size, times and inode, so that a start does not read 140 GB to hash them.

One small file per model file, in the user's own cache. A file there counts only if it belongs to the user, if nobody
else can write it, and if it describes the model file as it is now. Anything else in its place is ignored and replaced.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from thresher import durable
from thresher.data.store.cache import chosen_cache_dir, user_cache_dir

logger = logging.getLogger(__name__)

DIRECTORY_NAME = ".digests"  # hidden: the other directories there are references
_VERSION = 1
_MAX_BYTES = 1 << 26
# a file that was written so recently could change again without another time stamp
_SECONDS_TO_SETTLE = 2.0
_DIGEST = re.compile("[0-9a-f]{64}")

Digests = dict[str, str]


def remembered(file: Path, compute: Callable[[], Digests]) -> Digests:
    """Return the digests of a model file: those remembered of it, or computed ones, which are remembered."""
    file = file.resolve()
    before = _identity(file)
    path = _path_of(file)
    if (found := _read(path, file, before)) is not None:
        return found
    digests = compute()
    if _identity(file) == before and time.time() - file.stat().st_mtime > _SECONDS_TO_SETTLE:
        _write(path, {"version": _VERSION, "path": str(file), "identity": before, "digests": digests})
    return digests


def _identity(file: Path) -> list[int]:
    """What changes with the content of a file, or more often; the change time cannot be set back."""
    found = file.stat()
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]


def _path_of(file: Path) -> Path:
    # $THRESHER_CACHE_DIR or the user's: a directory that a config names may belong to others
    root = chosen_cache_dir(None) or user_cache_dir()
    return root / DIRECTORY_NAME / f"{hashlib.sha256(os.fsencode(file)).hexdigest()}.json"


def _read(path: Path, file: Path, identity: list[int]) -> Digests | None:
    try:
        # O_NONBLOCK: opening a pipe in this place must not wait for a writer
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as stream:  # noqa: PTH123
            found = os.fstat(stream.fileno())
            is_own = found.st_uid == os.getuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
            if not (stat.S_ISREG(found.st_mode) and is_own and found.st_size <= _MAX_BYTES):
                return None
            content = json.loads(stream.read())
    except (OSError, ValueError, RecursionError):
        return None
    return _digests_in(content, {"version": _VERSION, "path": str(file), "identity": identity})


def _digests_in(content: Any, expected: Mapping[str, object]) -> Digests | None:
    if not isinstance(content, dict) or any(content.get(name) != value for name, value in expected.items()):
        return None
    digests = content.get("digests")
    if not isinstance(digests, dict) or not digests:
        return None
    is_valid = all(isinstance(each, str) and _DIGEST.fullmatch(each) for each in digests.values())
    return digests if is_valid else None


def _write(path: Path, content: Mapping[str, object]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}-{secrets.token_hex(8)}")  # another run may write the same
        durable.replace(path, json.dumps(content).encode(), temporary=temporary)
        path.chmod(0o600)  # the umask may let a group write
    except OSError as error:  # the next start hashes the file again
        logger.info("cannot remember the digests of %s: %s", content["path"], error)
