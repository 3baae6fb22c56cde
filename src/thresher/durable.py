"""Files: writes that survive a crash, locks, names from untrusted files, and private tokens.

An atomic write goes to a temporary file first: write, fsync, rename, fsync of the directory.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import resource
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import IO, Any

from thresher.errors import DiskError, UserError

logger = logging.getLogger(__name__)

_MAX_RECORD_BYTES = 1 << 26


def sync_stream(stream: IO[Any]) -> None:
    """Flush an open file to the disk."""
    stream.flush()
    os.fsync(stream.fileno())


def sync_file(path: Path) -> None:
    """Flush a closed file to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_directory(path: Path) -> None:
    """Flush a directory's entries to the disk."""
    try:
        sync_file(path)
    except OSError as error:
        # Some network file systems cannot flush a directory and need not.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise


def write(path: Path, content: bytes) -> None:
    """Write a file inside a directory that is not published yet, and flush it to the disk."""
    with path.open("wb") as stream:
        stream.write(content)
        sync_stream(stream)


def replace(path: Path, content: bytes, *, temporary: Path | None = None) -> None:
    """Write a file atomically: after a crash it has the old content or the new.

    It is written to `temporary` first, a name in the same directory, `.<name>.new` unless given. A symlink there is
    removed, not followed.
    """
    temporary = temporary or path.with_name(f".{path.name}.new")
    try:
        temporary.unlink(missing_ok=True)
        with temporary.open("xb") as stream:
            stream.write(content)
            sync_stream(stream)
        temporary.replace(path)
        sync_directory(path.parent)
    except OSError:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def read_own_record(path: Path) -> dict[str, Any] | None:
    """Read what `write_own_record` wrote; None unless it belongs to the user and no other user can write it."""
    try:
        # O_NONBLOCK: opening a pipe in this place must not wait for a writer
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as stream:  # noqa: PTH123
            found = os.fstat(stream.fileno())
            is_own = found.st_uid == os.getuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
            if not (stat.S_ISREG(found.st_mode) and is_own and found.st_size <= _MAX_RECORD_BYTES):
                return None
            content = json.loads(stream.read())
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def is_private_directory(path: Path) -> bool:
    """Return whether a directory belongs to the user, and no other user can change it or put another in its place."""
    path = path.absolute()
    found = path.lstat()
    is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
    return is_own and all(_is_safe_parent(parent.stat()) for parent in path.parents)


def _is_safe_parent(found: os.stat_result) -> bool:
    is_writable = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not found.st_mode & stat.S_ISVTX
    return found.st_uid in (0, os.getuid()) and not is_writable


def write_own_record(path: Path, content: dict[str, Any]) -> None:
    """Remember something in a cache of the user; without it, the next start computes it again."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}-{secrets.token_hex(8)}")  # another run may write the same
        replace(path, json.dumps(content).encode(), temporary=temporary)
        path.chmod(0o600)  # the umask may let a group write
    except OSError as error:
        logger.info("cannot remember %s: %s", path, error)


def remove(path: Path, *, is_shared: bool = False) -> None:
    """Remove a file, a directory tree, or a symlink (never its target).

    `is_shared`: another process may be removing it at the same time.
    """
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=is_shared)
    else:
        path.unlink(missing_ok=is_shared)


def refuse_link(path: Path) -> None:
    """Raise if a directory that is about to be cleared is a symlink: its target does not belong to the run."""
    if path.is_symlink():
        raise UserError(f"{path} is a symlink, and thresher does not write through symlinks; remove it")


def lock(descriptor: int, *, wait: bool = False) -> bool:
    """Lock an open file or directory; return False if another process holds the lock and `wait` is not set.

    The kernel releases the lock when the descriptor is closed or the process ends, however it ends.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
            raise
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        raise UserError(
            f"the file system of {path} has no file locks ({error.strerror}); mount it with them (Lustre: `-o flock`), "
            "or use a directory on a different one"
        ) from None
    return True


def is_open_file(path: Path, descriptor: int) -> bool:
    """Return whether a path still names an open file: the owner of a lock may have removed it before it was locked."""
    try:
        return os.path.samestat(path.lstat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


@contextmanager
def translate_os_errors(
    failed: str, *, if_full: str = "free some space there", also: str = "", kind: type[UserError] = UserError
) -> Iterator[None]:
    """Turn an OSError into `<failed>: <reason>; <what to do><also>`: a DiskError if a retry may help."""
    try:
        yield
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        hint = open_files_hint(error) or (if_full if is_full else "check that this path is writable")
        raise (DiskError if DiskError.is_transient(error) else kind)(
            f"{failed}{where}: {error.strerror or error}; {hint}{also}"
        ) from error


def open_files_hint(error: OSError) -> str | None:
    """Return what to do if the error is a limit of open files; None if it is not."""
    if error.errno == errno.ENFILE:
        return "this machine's limit of open files is reached: raise it with `sysctl -w fs.file-max`"
    if error.errno != errno.EMFILE:
        return None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or soft < hard:
        higher = min(hard, 1 << 20) if hard > 0 else 1 << 20
        return (
            f"a process may open {soft} files: run `ulimit -n {higher}` in the shell that starts the run or `ray start`"
        )
    return (
        f"a process may open {soft} files: raise `nofile` in /etc/security/limits.conf, or LimitNOFILE of the service"
    )


def is_safe_relative_path(name: object) -> bool:
    """Return whether a name from an untrusted file, such as a manifest, stays below its directory."""
    if not isinstance(name, str) or not name or "\0" in name or PureWindowsPath(name).is_absolute():
        return False
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts and path.name != ""


def ensure_token(path: Path) -> None:
    """Create a file with a random token for this user alone; restrict an existing one that others may read.

    Processes of one user prove their identity by it. If they call this at the same time, they find the same token, even
    on several nodes that share the directory.
    """
    path.parent.mkdir(exist_ok=True)
    if not path.exists():
        with tempfile.NamedTemporaryFile("w", dir=path.parent) as file:  # its mode is 0600
            file.write(secrets.token_hex(32))
            file.flush()
            with suppress(FileExistsError):  # another process has just created it
                os.link(file.name, path)
    if path.stat().st_uid == os.getuid() and path.stat().st_mode & 0o077:
        path.chmod(0o600)
