"""The reference cache: per-token logps of one reference on disk, in immutable shards, and the lookup of a run's pairs.

The cache has one directory per reference, named by its fingerprint. It contains `identity.json`, a readable description
of the reference, and shards. A shard is an Arrow IPC file of one record batch; its name contains the time of writing,
the number of pairs and the SHA-256 of the file. Processes and machines share the directory without a lock: each shard
is written under a temporary name, flushed and renamed, and never changes. If two of them scored the same pair, the
oldest result is used, so a resumed run reads the same bits. At the end: the list, the check and the leftovers of the
whole cache.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import os
import re
import secrets
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from thresher import durable
from thresher.checkpoint.json_io import Json, encode, load_json
from thresher.data.store.arrow_schema import find_sorted, list_array
from thresher.data.store.cache import DIRECTORY_NAME, chosen_cache_dir, partial_stores, user_cache_dir
from thresher.data.store.reader import HASH_BYTES, HASH_DTYPE, MAX_OPEN_SHARDS, Hashes, fixed_width_values, list_views
from thresher.errors import CheckpointError, UserError
from thresher.redact import redact_text
from thresher.reference.fingerprint import SCORING_VERSION, ReferenceFingerprint

logger = logging.getLogger(__name__)

Logps = npt.NDArray[np.float32]

NO_LOGPS = np.zeros(0, dtype=np.float32)  # of a response that an example does not have
_LOGPS = pa.list_(pa.field("item", pa.float32(), nullable=False))
IDENTITY_NAME = "identity.json"
PARTIAL = ".partial-"
DAMAGED = ".damaged"
DIGEST_MISMATCH = "does not match the digest in its name"
_NAME = re.compile(r"(\d{13})-(\d+)-([0-9a-f]{64})\.arrow")


@dataclass(frozen=True)
class ShardFile:
    """A shard as described by its file name; created is in seconds since 1970."""

    path: Path
    created: float
    num_pairs: int
    sha256: str


def list_shards(directory: Path) -> list[ShardFile]:
    """List the shards of a directory, oldest first."""
    if not directory.is_dir():
        return []
    # names begin with the time; the digest breaks ties
    found = ((path, _NAME.fullmatch(path.name)) for path in sorted(directory.iterdir()))
    return [ShardFile(path, int(match[1]) / 1000, int(match[2]), match[3]) for path, match in found if match]


def verify_shard(shard: ShardFile) -> str | None:
    """Check a shard against its digest; return what is wrong with it, or None."""
    try:
        with shard.path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        return None if digest == shard.sha256 else DIGEST_MISMATCH
    except OSError as error:
        return f"cannot be read ({error.strerror or error})"


class CacheShard:
    """A shard mapped into memory."""

    def __init__(self, path: Path) -> None:
        reader = pa.ipc.open_file(pa.memory_map(str(path)))
        num_sides = len(reader.schema) - 1
        if not reader.schema.equals(_schema(num_sides)) or reader.num_record_batches != 1:
            raise ValueError("unexpected columns")
        batch = reader.get_batch(0)
        # without this, lists that extend beyond the file would crash the process
        batch.validate()
        self.keys: Hashes = fixed_width_values(batch.column(0), HASH_DTYPE)
        self._sides = [list_views(batch.column(at)) for at in range(1, 1 + num_sides)]

    def logps(self, row: int) -> list[Logps]:
        """Return the logps of each response of an example, as views of the file; none of an absent response."""
        return [values[offsets[row] : offsets[row + 1]] for offsets, values in self._sides]


def _schema(num_sides: int) -> Any:
    names = ("chosen", "rejected") if num_sides == 2 else [f"response_{number}" for number in range(num_sides)]
    key = pa.field("key", pa.binary(HASH_BYTES), nullable=False)
    return pa.schema([key, *(pa.field(name, _LOGPS, nullable=False) for name in names)])


def read_keys(path: Path) -> Hashes:
    """Copy the keys of a shard; raise ValueError or OSError for a file that is not a shard."""
    return CacheShard(path).keys.copy()


# a shard is written at this many bytes of logps, or seconds after its first pair; a kill loses less than one
SHARD_BYTES, SHARD_SECONDS = 64 * 2**20, 60.0


class ShardWriter:
    """Collect logps and write them as shards; the end of the `with` block writes the rest, even after an error."""

    def __init__(self, directory: Path) -> None:
        self.written: list[ShardFile] = []
        self._directory = directory
        self._pairs: list[tuple[bytes, Sequence[Logps]]] = []
        self._num_bytes = 0
        self._started = 0.0

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._flush()

    def add(self, key: bytes, sides: Sequence[Logps]) -> None:
        """Add one example's logps: of its first response, of its second, ..."""
        if not self._pairs:
            self._started = time.monotonic()
        self._pairs.append((key, sides))
        self._num_bytes += HASH_BYTES + sum(side.nbytes for side in sides)

    def end_block(self) -> None:
        """Write the shard if it is full; a block is never divided between shards."""
        if self._num_bytes >= SHARD_BYTES or time.monotonic() - self._started >= SHARD_SECONDS:
            self._flush()

    def _flush(self) -> None:
        if self._pairs:
            pairs = self._pairs
            # cleared first: __exit__ must not retry a failed write
            self._pairs, self._num_bytes = [], 0
            self.written.append(write_shard(self._directory, *zip(*pairs, strict=True)))


def write_shard(directory: Path, keys: Sequence[bytes], logps: Sequence[Sequence[Logps]]) -> ShardFile:
    """Write the logps of each example as a shard, atomically and flushed to the disk."""
    hashes = pa.Array.from_buffers(pa.binary(HASH_BYTES), len(keys), [None, pa.py_buffer(b"".join(keys))])
    by_side = list(itertools.zip_longest(*logps, fillvalue=NO_LOGPS))
    schema = _schema(len(by_side))
    columns = [hashes, *(list_array(side, _LOGPS) for side in by_side)]
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema) as writer:
        writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=schema))
    content = sink.getvalue()
    sha256 = hashlib.sha256(content).hexdigest()
    created = time.time_ns() // 1_000_000
    path = directory / f"{created:013d}-{len(keys)}-{sha256}.arrow"
    temporary = directory / f"{PARTIAL}{secrets.token_hex(8)}"
    with durable.translate_os_errors(
        f"could not write to the reference cache in {directory}",
        if_full="free some space there (`thresher cache prune`)",
        also=", or set reference.cache_dir to a different directory",
    ):
        durable.replace(path, content, temporary=temporary)
    return ShardFile(path, created / 1000, len(keys), sha256)


_ROW_BITS = 32
_SORTABLE = np.dtype(f"S{HASH_BYTES}")
Positions = npt.NDArray[np.int64]


class ReferenceCache:
    """The cached logps of one reference; model is the path it was loaded from, kept as a description."""

    def __init__(self, root: Path, fingerprint: ReferenceFingerprint, model: str) -> None:
        self.directory = root / fingerprint.digest[:32]
        self._fingerprint = fingerprint
        self._model = model
        self._verified: set[str] = set()
        with contextlib.suppress(OSError):  # absent or read-only
            os.utime(self.directory / IDENTITY_NAME)  # the time of last use, for `thresher cache prune`

    def writer(self) -> ShardWriter:
        """Open the directory for writing; create it if needed."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            if not (self.directory / IDENTITY_NAME).exists():
                created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
                model = redact_text(self._model)
                description: dict[str, Json] = {"model": model, "created": created, "scoring_version": SCORING_VERSION}
                temporary = self.directory / f"{PARTIAL}{secrets.token_hex(8)}"
                content = encode(description | self._fingerprint.content)
                durable.replace(self.directory / IDENTITY_NAME, content, temporary=temporary)
        except OSError as error:
            problem = f"could not create the reference cache in {self.directory}: {error.strerror or error}"
            raise UserError(f"{problem}; set reference.cache_dir to a writable directory") from error
        return ShardWriter(self.directory)

    def find(self, keys: Hashes) -> FoundLogps:
        """Find pairs by their keys, in time O((run + cache) log run); skip damaged shards with a warning."""
        # as byte strings, which numpy can sort; pyarrow's index_in would hash all of them again for every shard
        wanted, inverse = np.unique(keys.view(_SORTABLE), return_inverse=True)
        locations = np.full(len(wanted), -1, dtype=np.int64)
        shards = list_shards(self.directory)
        # reading and hashing release the GIL, so a few threads keep a fast disk busy
        with ThreadPoolExecutor(max_workers=4) as pool:
            for number, match in enumerate(pool.map(lambda shard: self._search(shard, wanted), shards)):
                if isinstance(match, str):
                    self._quarantine(shards[number], match)
                    continue
                rows = np.flatnonzero(match >= 0)
                # backwards, so that the first of several copies in a shard wins, as the first of several shards does
                rows = rows[locations[match[rows]] < 0][::-1]
                locations[match[rows]] = (number << _ROW_BITS) + rows
        return FoundLogps(shards, locations[inverse])

    def mark_verified(self, shards: list[ShardFile]) -> None:
        """Count shards that this process has just written as valid, without reading them again."""
        self._verified |= {shard.path.name for shard in shards}

    def _search(self, shard: ShardFile, wanted: npt.NDArray[np.bytes_]) -> Positions | str:
        """Match a shard's keys, and verify its digest if any pair is needed; return what is wrong with it as text."""
        match = None
        with contextlib.suppress(OSError, ValueError):  # verify_shard below reports why it cannot be read
            match = find_sorted(read_keys(shard.path).view(_SORTABLE), wanted)
            if not (match >= 0).any() or shard.path.name in self._verified:
                return match
        problem = verify_shard(shard)
        if problem is None and match is not None:
            self._verified.add(shard.path.name)
            return match
        return problem or "is not a shard that this version can read"

    def _quarantine(self, shard: ShardFile, problem: str) -> None:
        if problem == DIGEST_MISMATCH:
            # renamed, so that it is reported once, and all processes agree that its pairs are missing
            with contextlib.suppress(OSError):
                shard.path.rename(shard.path.with_name(shard.path.name + DAMAGED))
        logger.warning("reference cache: %s %s; the pairs needed from it are scored again", shard.path, problem)


class FoundLogps:
    """The shard and row of each requested pair, if it is cached. 8 bytes per pair; logps stay on disk."""

    def __init__(self, shards: list[ShardFile], locations: Positions) -> None:
        self._locations = locations
        self._shard = lru_cache(MAX_OPEN_SHARDS)(lambda number: _open_shard(shards[number].path))

    def is_missing(self, positions: Positions | slice = slice(None)) -> npt.NDArray[np.bool_]:
        return self._locations[positions] < 0

    def logps(self, position: int) -> list[Logps]:
        """Read the logps of one example's responses."""
        location = int(self._locations[position])
        if location < 0:
            raise KeyError(f"the pair at position {position} is not in the cache")
        return self._shard(location >> _ROW_BITS).logps(location & ((1 << _ROW_BITS) - 1))


def _open_shard(path: Path) -> CacheShard:
    try:
        return CacheShard(path)
    except (OSError, ValueError) as error:
        problem = f"{path} was removed from the reference cache or damaged during this run ({error})"
        hint = "rerun with resume_from_checkpoint=auto to score the missing pairs again"
        raise UserError(f"{problem}; {hint}") from error


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
