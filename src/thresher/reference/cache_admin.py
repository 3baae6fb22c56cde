"""Maintenance of the whole reference cache: locate it, list it, verify it, delete from it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from thresher.checkpoint.json_io import load_json
from thresher.checkpoint.save import delete
from thresher.data.store.cache import DIRECTORY_NAME, chosen_cache_dir, partial_stores, user_cache_dir
from thresher.errors import CheckpointError
from thresher.reference.cache import DAMAGED, IDENTITY_NAME, PARTIAL, ShardFile, list_shards, read_keys, verify_shard

# a shard takes seconds to write: an older partial file was left by a process that died
_MAX_WRITE_SECONDS = 24 * 3600.0


@dataclass(frozen=True)
class CachedReference:
    """The cached logps of one reference; last_used is in seconds since 1970."""

    directory: Path
    model: str
    dtype: str
    num_pairs: int
    num_shards: int
    num_bytes: int
    last_used: float

    @property
    def identity(self) -> str:
        return self.directory.name


def cache_root(cache_dir: str | None) -> Path:
    """Return the cache directory: from the config, else `$THRESHER_CACHE_DIR`, else the user's cache directory."""
    return chosen_cache_dir(cache_dir) or user_cache_dir() / "reference"


def list_references(root: Path) -> list[CachedReference]:
    """Describe all references in the cache, the most recently used first."""
    found = [_describe(path) for path in _directories(root)]
    return sorted(found, key=lambda reference: -reference.last_used)


def verify_cache(root: Path) -> Iterator[tuple[ShardFile, str | None]]:
    """Read every shard in full; yield each with what is wrong with it, or None."""
    for directory in _directories(root):
        for shard in list_shards(directory):
            yield shard, verify_shard(shard) or _content_problem(shard)


def stale_files(root: Path, stores: Path) -> list[Path]:
    """List partially written or deleted files of killed processes, and damaged shards and stores that runs renamed."""
    old = time.time() - _MAX_WRITE_SECONDS
    found, partial = partial_stores(stores)
    found += [path for path in partial if _last_written(path) < old]
    found += [path for path in root.glob(".deleted-*") if path.is_dir()] if root.is_dir() else []
    for directory in _directories(root):
        if directory.is_symlink():
            continue  # its target does not belong to the cache
        found += sorted(directory.glob(f"*{DAMAGED}"))
        found += [path for path in sorted(directory.glob(f"{PARTIAL}*")) if _last_written(path) < old]
    return found


def _last_written(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:  # its writer has just renamed it
        return time.time()


def remove(paths: Iterable[Path]) -> None:
    """Delete directories and files of the cache, never the target of a symlink."""
    for path in paths:
        if path.is_dir():
            delete(path)
        else:
            path.unlink(missing_ok=True)


def _directories(root: Path) -> list[Path]:
    if not root.is_dir():
        return []
    paths = (path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
    return sorted(path for path in paths if path.name != DIRECTORY_NAME)


def _describe(directory: Path) -> CachedReference:
    description: dict[str, str] = {}
    last_used = directory.stat().st_mtime
    with contextlib.suppress(CheckpointError):
        read = load_json(directory / IDENTITY_NAME)
        description = {key: str(value) for key, value in read.items()} if isinstance(read, dict) else {}
        last_used = (directory / IDENTITY_NAME).stat().st_mtime
    shards = list_shards(directory)
    return CachedReference(
        directory,
        description.get("model", "unknown: identity.json is missing or damaged"),
        description.get("dtype", "?"),
        sum(shard.num_pairs for shard in shards),
        len(shards),
        sum(shard.path.stat().st_size for shard in shards),
        max([last_used, *(shard.created for shard in shards)]),
    )


def _content_problem(shard: ShardFile) -> str | None:
    try:
        num_pairs = len(read_keys(shard.path))
    except (OSError, ValueError) as error:
        return f"is not a shard that this version can read ({error})"
    return None if num_pairs == shard.num_pairs else f"contains {num_pairs} pairs, not {shard.num_pairs} as in its name"
