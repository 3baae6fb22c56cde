"""The cache of prepared stores, shared by runs: one directory per store, named by its fingerprint.

A run gets its own directory with hard links to the files of an entry, or copies if the cache is on a different file
system, so entries can be removed at any time. Processes and machines share the cache without a lock: entries are
published by one rename and never change. Every file is compared with its digest before a run uses it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from thresher import durable
from thresher.data.store.reader import ExampleStore
from thresher.data.store.writer import Staging, quarantine_file
from thresher.errors import UserError

logger = logging.getLogger(__name__)

DIRECTORY_NAME = "stores"
PARTIAL = ".partial-"
DAMAGED = ".damaged-"


def chosen_cache_dir(cache_dir: str | None) -> Path | None:
    """Return the config's cache directory, else `$THRESHER_CACHE_DIR`, else None."""
    chosen = cache_dir or os.environ.get("THRESHER_CACHE_DIR")
    return Path(chosen).expanduser() if chosen else None


def user_cache_dir() -> Path:
    """Return the directory of thresher's caches if none is chosen."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "thresher"


class StoreCache:
    """The stores below `cache_dir`; see `chosen_cache_dir` for the default."""

    def __init__(self, cache_dir: str | None) -> None:
        self.root = (chosen_cache_dir(cache_dir) or user_cache_dir()) / DIRECTORY_NAME

    @contextlib.contextmanager
    def reserve(self, fingerprint: str) -> Iterator[None]:
        """Wait for a process of this machine that prepares the same pairs, so the work is done once."""
        path = self.root / f".{fingerprint}.lock"
        descriptor = self._lock(path)
        try:
            yield
        finally:
            if descriptor is not None:
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)
                os.close(descriptor)

    def fetch(self, fingerprint: str, output: Path) -> bool:
        """Create a store at `output` from the cache; return False if the cache has none that is valid."""
        entry = self.root / fingerprint
        if not entry.is_dir():
            return False
        staging = Staging(output)
        try:
            if not self._copy(entry, staging.content):
                return False
            staging.publish(overwrite=False)
        finally:
            staging.close(failed=False)
        with contextlib.suppress(OSError):  # a read-only cache
            os.utime(entry)  # the time of last use, for `thresher cache prune`
        logger.info("using prepared pairs from the cache in %s", output)
        return True

    def add(self, store: ExampleStore) -> None:
        """Add a store, unless the cache has it; a cache that cannot be written is reported and does no harm."""
        entry = self.root / store.fingerprint
        if quarantine_file(store.path).exists():
            return  # another run needs the rejected rows as well, and they may be private
        temporary = self.root / f"{PARTIAL}{secrets.token_hex(8)}"
        try:
            temporary.mkdir(parents=True)
            _link_files(store, temporary)
            for directory in (temporary, *(path for path in temporary.rglob("*") if path.is_dir())):
                durable.sync_directory(directory)
            temporary.rename(entry)
            durable.sync_directory(self.root)
        except OSError as error:
            shutil.rmtree(temporary, ignore_errors=True)
            if not entry.is_dir():  # else another process has added it
                logger.warning(
                    "could not add the prepared pairs to the cache in %s: %s; other runs prepare them again. Set "
                    "cache_dir to a writable directory",
                    self.root,
                    error.strerror or error,
                )

    def _copy(self, entry: Path, target: Path) -> bool:
        try:
            store = ExampleStore.open(entry, expected_fingerprint=entry.name)
            store.verify()
            _link_files(store, target)
        except UserError as error:
            # renamed: it is reported once, and this run can add a valid one
            with contextlib.suppress(OSError):
                entry.rename(self.root / f"{DAMAGED}{entry.name}-{secrets.token_hex(6)}")
            logger.warning("store cache: %s is set aside, and its pairs are prepared again: %s", entry, error)
            return False
        except OSError as error:  # removed at this moment, or a disk that is full
            logger.warning("could not use the cached store %s: %s; its pairs are prepared again", entry, error)
            return False
        return True

    def _lock(self, path: Path) -> int | None:
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            while True:
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
                try:
                    if not durable.lock(descriptor):
                        logger.info("another process is preparing the same pairs; waiting for it")
                        durable.lock(descriptor, wait=True)
                    if durable.is_open_file(path, descriptor):
                        return descriptor
                except BaseException:
                    os.close(descriptor)
                    raise
                os.close(descriptor)
        except OSError:
            return None  # a cache that is read-only or has no locks: preparing pairs twice is safe


def _link_files(store: ExampleStore, target: Path) -> None:
    for name in store.file_names:
        source, destination = store.path / name, target / name
        if source.is_symlink():
            raise UserError(f"the store {store.path} is damaged: {name} is a symlink; prepare it again")
        destination.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(source, destination, follow_symlinks=False)
        except OSError:  # a different file system, one without hard links, or a different user's files
            shutil.copyfile(source, destination, follow_symlinks=False)
            durable.sync_file(destination)


@dataclass(frozen=True)
class CachedStore:
    """An entry of the cache."""

    directory: Path
    sources: tuple[str, ...]  # names of its source files
    num_pairs: int
    num_bytes: int
    last_used: float  # in seconds since 1970

    @property
    def identity(self) -> str:
        return self.directory.name


def list_stores(root: Path) -> list[CachedStore]:
    """Describe all stores of the cache, the most recently used first."""
    found = [_describe(path) for path in _entries(root)]
    return sorted(found, key=lambda store: -store.last_used)


def verify_stores(root: Path) -> Iterator[tuple[Path, str | None]]:
    """Read every store in full; yield its directory and the problem, or None."""
    for entry in _entries(root):
        problem = None
        try:
            ExampleStore.open(entry, expected_fingerprint=entry.name).verify()
        except UserError as error:
            problem = str(error)
        yield entry, problem


def partial_stores(root: Path) -> tuple[list[Path], list[Path]]:
    """List what can be removed: damaged stores that runs set aside, and files in use or left by killed processes."""
    hidden = sorted(root.glob(".*")) if root.is_dir() else []
    damaged = [path for path in hidden if path.name.startswith((DAMAGED, ".deleted-"))]
    return damaged, [path for path in hidden if path.name.startswith(PARTIAL) or path.name.endswith(".lock")]


def _entries(root: Path) -> list[Path]:
    if not root.is_dir():
        return []
    return sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))


def _describe(entry: Path) -> CachedStore:
    last_used = entry.stat().st_mtime
    try:
        store = ExampleStore.open(entry)
        sources = tuple(str(file["name"]) for file in store.manifest["report"]["files"])
    except (UserError, KeyError, TypeError) as error:
        size = sum(path.lstat().st_size for path in entry.rglob("*") if not path.is_dir())
        return CachedStore(entry, (f"unknown: {error}",), 0, size, last_used)
    return CachedStore(
        entry, sources, len(store), sum((entry / name).stat().st_size for name in store.file_names), last_used
    )
