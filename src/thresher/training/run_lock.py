"""The lock on a run directory: one process at a time trains into it.

The lock is the OS lock on a file, which the kernel releases when its process ends, however it ends. The file describes
the holder. Locks that do not reach other hosts, or other mounts on the same host, are covered by a heartbeat: the
holder refreshes the file's modification time, and a start on another host or mount takes over only if that stops. A
file system without locks is an error.
"""

from __future__ import annotations

import getpass
import json
import logging
import os
import secrets
import shlex
import socket
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from thresher import durable
from thresher.errors import UserError
from thresher.redact import redact_text

logger = logging.getLogger(__name__)

FILE_NAME = ".run.lock"
HEARTBEAT_SECONDS = 5.0
# a holder on another host or mount counts as dead after this time without a heartbeat
STALE_SECONDS = 60.0
# a process that takes over locks the stale file for a moment before it removes it
_SECONDS_TO_TAKE_OVER = 0.2
_MAX_RECORD_BYTES = 64 * 1024


@dataclass(frozen=True)
class Holder:
    """The process that holds a lock."""

    pid: str
    host: str
    # differs between hosts, boots and mounts: the kernel does not pass a lock from one FUSE mount to another
    machine: str
    user: str
    started: str
    command: str

    @classmethod
    def of_this_process(cls, descriptor: int) -> Holder:
        """Describe this process as the holder of an open lock file."""
        try:
            user = getpass.getuser()
        except (KeyError, OSError):  # a container's user may have no name
            user = str(os.getuid())
        started = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        command = redact_text(shlex.join(sys.orig_argv))
        return cls(str(os.getpid()), socket.gethostname(), _machine(descriptor), user, started, command)

    @classmethod
    def read(cls, descriptor: int) -> Holder:
        """Read the description of a holder; fields that are absent or damaged are unknown."""
        record: object = None
        with suppress(OSError, ValueError, RecursionError):
            record = json.loads(os.pread(descriptor, _MAX_RECORD_BYTES, 0))
        fields = record if isinstance(record, Mapping) else {}
        return cls(**{name: str(fields.get(name, "unknown")) for name in cls.__dataclass_fields__})

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} (user {self.user}, started {self.started}): {self.command}"


@contextmanager
def lock_run(
    directory: Path, *, heartbeat_seconds: float = HEARTBEAT_SECONDS, stale_seconds: float = STALE_SECONDS
) -> Iterator[None]:
    """Hold the lock on a run directory; raise if another process holds it, and take it over from a dead one."""
    path = directory / FILE_NAME
    directory.mkdir(parents=True, exist_ok=True)
    descriptor = _acquire(path, stale_seconds)
    ended = threading.Event()

    def send_heartbeats() -> None:
        while not ended.wait(heartbeat_seconds):
            with suppress(OSError):  # the file server may be back at the next heartbeat
                if not durable.is_open_file(path, descriptor):
                    logger.warning("%s was removed; another run can start in this directory and damage this one", path)
                    return
                os.utime(descriptor)

    heartbeat = threading.Thread(target=send_heartbeats, name="run lock", daemon=True)
    heartbeat.start()
    try:
        yield
    finally:
        ended.set()
        heartbeat.join()
        if durable.is_open_file(path, descriptor):
            path.unlink(missing_ok=True)
        os.close(descriptor)


def wait_until_unlocked(directory: Path, seconds: float) -> None:
    """Wait for a process that is about to end; return when no process of this host holds the lock, or after a time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            descriptor = os.open(directory / FILE_NAME, os.O_RDONLY | os.O_NOFOLLOW)
        except OSError:
            return
        try:
            if durable.lock(descriptor):
                return
        except OSError:  # the file server does not answer
            return
        finally:
            os.close(descriptor)
        time.sleep(0.2)


def _acquire(path: Path, stale_seconds: float) -> int:
    # locked and written before it gets its name, so that no process sees a file without a holder
    temporary = path.with_name(f"{FILE_NAME}-{secrets.token_hex(6)}")
    try:
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path.parent)) from error
    try:
        with suppress(OSError):  # the file server does not answer: the heartbeat decides
            durable.lock(descriptor)
        os.write(descriptor, json.dumps(asdict(Holder.of_this_process(descriptor))).encode())
        while not _publish(temporary, path):
            _remove_stale(path, stale_seconds)
    except BaseException:
        os.close(descriptor)
        raise
    finally:
        temporary.unlink(missing_ok=True)
    return descriptor


def _publish(temporary: Path, path: Path) -> bool:
    """Give the file its name; return False if the name is taken."""
    try:
        os.link(temporary, path, follow_symlinks=False)
    except FileExistsError:
        return False
    except OSError:  # a file system without hard links
        if os.path.lexists(path):
            return False
        temporary.rename(path)
    return True


def _remove_stale(path: Path, stale_seconds: float) -> None:
    """Remove the file of a process that ended without releasing the lock; raise if its process runs."""
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            raise UserError(f"{path} is not a lock file of a run; remove it")
        # an exclusive lock on NFS needs write access
        flags = os.O_RDWR if os.access(path, os.W_OK) else os.O_RDONLY
        descriptor = os.open(path, flags | os.O_NOFOLLOW)
    except FileNotFoundError:
        return
    try:
        holder = Holder.read(descriptor)
        is_locked, proves_death = False, holder.machine == _machine(descriptor)
        try:
            is_locked = not durable.lock(descriptor)
        except OSError:
            proves_death = False
        if is_locked:
            time.sleep(_SECONDS_TO_TAKE_OVER)
        if not durable.is_open_file(path, descriptor):
            return
        if is_locked:
            raise UserError(
                f"{path.parent} is in use by {holder}. Wait until it ends, stop it, or set a different output_dir"
            )
        if not proves_death:
            _wait_until_stale(path, holder, stale_seconds)
        if durable.is_open_file(path, descriptor):
            path.unlink(missing_ok=True)
            logger.info("taking over %s from a process that has died: %s", path.parent, holder)
    finally:
        os.close(descriptor)


def _wait_until_stale(path: Path, holder: Holder, stale_seconds: float) -> None:
    """Return once a file had no heartbeat for `stale_seconds`; raise at its next heartbeat."""
    with tempfile.TemporaryFile(dir=path.parent) as probe:
        now = os.fstat(probe.fileno()).st_mtime  # by the clock of the file server, like the heartbeats
    last = _modified(path)
    # a heartbeat in the future, by a clock that was set back, counts as one of now
    remaining = stale_seconds - max(0.0, now - last) if last is not None else 0.0
    end = time.monotonic() + remaining
    if remaining > 0:
        logger.info("waiting up to %.0f s for a heartbeat of the last holder of %s: %s", remaining, path.parent, holder)
    while (remaining := end - time.monotonic()) > 0:
        time.sleep(min(1.0, remaining))
        current = _modified(path)
        if current is None:
            return
        if current != last:
            raise UserError(
                f"{path.parent} is in use by {holder}. Wait until it ends, stop it, or set a different output_dir; if "
                f"that process does not exist, delete {path}"
            )


def _modified(path: Path) -> float | None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)  # opened, because NFS clients cache the times of files
    except FileNotFoundError:
        return None
    try:
        return os.fstat(descriptor).st_mtime
    finally:
        os.close(descriptor)


def _machine(descriptor: int) -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        boot = socket.gethostname()
    return f"{boot} {os.fstat(descriptor).st_dev}"
