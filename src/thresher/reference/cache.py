"""The reference cache: per-token logps of one reference on disk, in immutable shards, and the lookup of a run's pairs.

The cache has one directory per reference, named by its fingerprint. It contains `identity.json`, a readable description
of the reference, and shards. A shard is an Arrow IPC file of one record batch; its name contains the time of writing,
the number of pairs and the SHA-256 of the file. Processes and machines share the directory without a lock: each shard
is written under a temporary name, flushed and renamed, and never changes. If two of them scored the same pair, the
oldest result is used, so a resumed run reads the same bits. One process looks up and verifies; the others get what it
has found. At the end: the list, the check and the leftovers of the whole cache.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import logging
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from thresher import durable
from thresher.checkpoint.json_io import Json, encode, load_json
from thresher.data.batching.plan import PairIds, PairSet
from thresher.data.store.arrow_schema import list_array
from thresher.data.store.cache import DIRECTORY_NAME, chosen_cache_dir, partial_stores, user_cache_dir
from thresher.data.store.reader import HASH_BYTES, HASH_DTYPE, MAX_OPEN_SHARDS, Hashes, fixed_width_values, list_views
from thresher.errors import CheckpointError, UserError
from thresher.redact import redact_text
from thresher.reference.extents import (
    PARTIAL,
    ROW_BITS,
    Extents,
    RowRanges,
    Rows,
    build_extents,
    extents_files,
    shards_of,
)
from thresher.reference.fingerprint import (
    DIGEST_MISMATCH,
    SCORING_VERSION,
    ReferenceFingerprint,
    VerifiedFiles,
    find_digest_problem,
)

logger = logging.getLogger(__name__)

Logps = npt.NDArray[np.float32]
T = TypeVar("T")

NO_LOGPS = np.zeros(0, dtype=np.float32)  # of a response that an example does not have
_LOGPS = pa.list_(pa.field("item", pa.float32(), nullable=False))
_ORIGINS = b"origins"  # in the schema's metadata, so the digest in the name covers it
IDENTITY_NAME = "identity.json"
DAMAGED = ".damaged"
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
    return find_digest_problem(shard.path, shard.sha256)


class Origin(NamedTuple):
    """Where a pair was read: the digest of its store, and its row there."""

    store: str
    row: int


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
        self._origins = (reader.schema.metadata or {}).get(_ORIGINS)

    def rows_by_store(self) -> dict[str, RowRanges]:
        """Return which rows of which stores this shard lists, by their digests; raise ValueError if it cannot."""
        if self._origins is None:
            return {}
        try:
            listed = {str(store): RowRanges(*np.array(each, np.int64).T) for store, each in _ranges_in(self._origins)}
        except (TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise ValueError(f"invalid origins ({error})") from error
        for each in listed.values():
            is_inside = (each.shard_rows >= 0) & (each.shard_rows <= len(self.keys) - each.counts) & (each.counts > 0)
            if not (is_inside & (each.store_rows >= 0) & (each.store_rows < 1 << 40)).all():
                raise ValueError("invalid origins")
        return listed

    def logps(self, row: int) -> list[Logps]:
        """Return the logps of each response of an example, as views of the file; none of an absent response."""
        return [values[offsets[row] : offsets[row + 1]] for offsets, values in self._sides]


def _schema(num_sides: int) -> Any:
    names = ("chosen", "rejected") if num_sides == 2 else [f"response_{number}" for number in range(num_sides)]
    key = pa.field("key", pa.binary(HASH_BYTES), nullable=False)
    return pa.schema([key, *(pa.field(name, _LOGPS, nullable=False) for name in names)])


def _ranges_in(content: bytes) -> list[tuple[str, Any]]:
    return list(json.loads(content).items())


def _describe_origins(origins: Sequence[Origin | None]) -> bytes:
    """List rows by store, as ranges (row in the shard, row in the store, number of rows)."""
    ranges: dict[str, list[list[int]]] = {}
    for row, origin in enumerate(origins):
        if origin is None:
            continue
        of_store = ranges.setdefault(origin.store, [])
        if of_store and [row, origin.row] == [start + of_store[-1][2] for start in of_store[-1][:2]]:
            of_store[-1][2] += 1
        else:
            of_store.append([row, origin.row, 1])
    return json.dumps(ranges, separators=(",", ":")).encode()


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
        self._pairs: list[tuple[bytes, Sequence[Logps], Origin | None]] = []
        self._num_bytes = 0
        self._started = 0.0

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._flush()

    def add(self, key: bytes, sides: Sequence[Logps], origin: Origin | None = None) -> None:
        """Add one example's logps: of its first response, of its second, ..."""
        if not self._pairs:
            self._started = time.monotonic()
        self._pairs.append((key, sides, origin))
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


def write_shard(
    directory: Path, keys: Sequence[bytes], logps: Sequence[Sequence[Logps]], origins: Sequence[Origin | None] = ()
) -> ShardFile:
    """Write the logps of each example as a shard, atomically and flushed to the disk."""
    hashes = pa.Array.from_buffers(pa.binary(HASH_BYTES), len(keys), [None, pa.py_buffer(b"".join(keys))])
    by_side = list(itertools.zip_longest(*logps, fillvalue=NO_LOGPS))
    schema = _schema(len(by_side)).with_metadata({_ORIGINS: _describe_origins(origins)})
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


class ReferenceCache:
    """The cached logps of one reference; model is the path it was loaded from, kept as a description."""

    def __init__(self, root: Path, fingerprint: ReferenceFingerprint, model: str) -> None:
        self.directory = root / fingerprint.digest[:32]
        self._fingerprint = fingerprint
        self._model = model
        self._damaged: set[str] = set()  # and not renamed, as in a read-only directory
        self._origins: dict[str, dict[str, RowRanges]] = {}
        with contextlib.suppress(OSError):  # absent or read-only
            os.utime(self.directory / IDENTITY_NAME)  # the time of last use, for `thresher cache prune`

    @cached_property
    def _verified(self) -> VerifiedFiles:
        return VerifiedFiles(self.directory)

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

    def find(self, parts: Sequence[Rows], wanted: PairSet) -> FoundLogps:
        """Find the pairs of some stores, numbered from one to the next; verify the shards that have wanted ones.

        A damaged shard is skipped with a warning.
        """
        while True:
            listed = list_shards(self.directory)
            shards = {each.path.name: each for each in listed if each.path.name not in self._damaged}
            try:
                found = self._find_in(parts, shards)
                found.count(wanted)
                needed = [shards[name] for name in found.needed]
            except _UnreadableShardsError as error:
                found, needed = None, [shards[name] for name in error.names]
            problems = self._on_each(lambda shard: self._verified.find_problem(shard.path, shard.sha256), needed)
            for shard, problem in zip(needed, problems, strict=True):
                if found is None or problem is not None:
                    self._quarantine(shard, problem or "is not a shard that this version can read")
            self._verified.save([*shards, *(path.name for path in extents_files(self.directory))])
            if found is not None and not any(problems):
                self._origins.clear()
                return found

    def mark_verified(self, shards: list[ShardFile]) -> None:
        """Count shards that this process has just written as valid, without reading them again."""
        for shard in shards:
            self._verified.add(shard.path)

    def _find_in(self, parts: Sequence[Rows], shards: Mapping[str, ShardFile]) -> FoundLogps:
        """Find pairs in shards that may be damaged."""

        def read_origins(names: Sequence[str]) -> None:
            new = [shards[name] for name in names if name not in self._origins]
            read = self._on_each(_read_origins, new)
            self._origins |= {shard.path.name: each for shard, each in zip(new, read, strict=True) if each is not None}
            if unreadable := [name for name in names if name not in self._origins]:
                raise _UnreadableShardsError(unreadable)

        def keys_of(name: str) -> Hashes:
            try:
                return CacheShard(shards[name].path).keys
            except (OSError, ValueError) as error:
                raise _UnreadableShardsError([name]) from error

        def extents_of(part: Rows) -> Extents:
            def ranges_of(names: Sequence[str]) -> dict[str, RowRanges]:
                read_origins(names)
                return {name: self._origins[name][digest] for name in names if digest in self._origins[name]}

            digest, num_pairs = part.digest, {name: shard.num_pairs for name, shard in shards.items()}
            return build_extents(self.directory, part, num_pairs, ranges_of, keys_of, self._verified)

        return FoundLogps(self.directory, [extents_of(part) for part in parts], list(shards))

    @staticmethod
    def _on_each(function: Callable[[ShardFile], T], shards: Sequence[ShardFile]) -> list[T]:
        # reading and hashing release the GIL, so a few threads keep a fast disk busy
        with ThreadPoolExecutor(max_workers=4) as pool:
            return list(pool.map(function, shards))

    def _quarantine(self, shard: ShardFile, problem: str) -> None:
        self._damaged.add(shard.path.name)
        if problem == DIGEST_MISMATCH:
            # renamed, so that it is reported once, and all processes agree that its pairs are missing
            with contextlib.suppress(OSError):
                shard.path.rename(shard.path.with_name(shard.path.name + DAMAGED))
        logger.warning("reference cache: %s %s; the pairs needed from it are scored again", shard.path, problem)


class FoundLogps:
    """Where the pairs of a run are in the cache; logps stay on disk. Other ranks get a pickled copy, which is small."""

    num_found: int
    num_missing: int
    needed: list[str]  # names of the shards with pairs that the run visits

    def __init__(self, directory: Path, parts: Sequence[Extents], shards: Sequence[str] | None = None) -> None:
        """Take the names of the shards, or read them from a file of extents."""
        if shards is None:
            shards = shards_of(next(part.path for part in parts if part.path is not None))
        self._directory, self._parts, self._shards = directory, parts, shards
        self._starts = np.cumsum([0, *(part.num_rows for part in parts)])
        self._shard = lru_cache(MAX_OPEN_SHARDS)(lambda number: _open_shard(directory / shards[number]))

    def count(self, wanted: PairSet) -> None:
        """Count which pairs of a run are found, and list the shards that have them."""
        self.num_missing, is_needed = 0, np.zeros(len(self._shards), dtype=np.bool_)
        for counts, locations in self._wanted_extents(wanted):
            self.num_missing += int(counts[locations < 0].sum())
            is_needed[locations[locations >= 0] >> ROW_BITS] = True
        self.num_found = len(wanted) - self.num_missing
        self.needed = [self._shards[number] for number in np.flatnonzero(is_needed).tolist()]

    def _wanted_extents(self, wanted: PairSet) -> Iterator[tuple[PairIds, PairIds]]:
        """Yield numbers of pairs and their locations."""
        if wanted.is_all:
            for part in self._parts:
                yield from part.chunks()
            return
        for start, stop in wanted.ranges():
            locations = self._between(start, stop)[wanted.mask(start, stop)]
            yield np.ones(len(locations), dtype=np.int64), locations

    def is_missing(self, start: int, stop: int) -> npt.NDArray[np.bool_]:
        """Return for each of some consecutive pairs whether the cache lacks it."""
        return self._between(start, stop) < 0

    def _between(self, start: int, stop: int) -> PairIds:
        starts = zip(self._parts, self._starts.tolist(), strict=False)
        inside = [(part, max(0, start - first), min(part.num_rows, stop - first)) for part, first in starts]
        return np.concatenate([part.between(first, last) for part, first, last in inside if first < last] or [_NO_ROWS])

    def read(self, pair_ids: PairIds) -> list[tuple[bytes, list[Logps]]]:
        """Read the key and the logps of the responses of some examples."""
        locations, of_part = np.full(len(pair_ids), -1), np.searchsorted(self._starts, pair_ids, side="right") - 1
        for part in np.unique(of_part).tolist():
            is_here = of_part == part
            locations[is_here] = self._parts[part].locate(pair_ids[is_here] - self._starts[part])
        found = []
        for pair_id, location in zip(pair_ids.tolist(), locations.tolist(), strict=True):
            if location < 0:
                raise IndexError(f"pair {pair_id} was not looked up in the cache, or it is not there")
            shard, row = self._shard(location >> ROW_BITS), location & ((1 << ROW_BITS) - 1)
            found.append((shard.keys[row].tobytes(), shard.logps(row)))
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        shards = None if any(part.path is not None for part in self._parts) else self._shards
        counts = {"num_found": self.num_found, "num_missing": self.num_missing, "needed": []}
        return type(self), (self._directory, self._parts, shards), counts


_NO_ROWS = np.zeros(0, dtype=np.int64)


class _UnreadableShardsError(Exception):
    """Files that have a shard's name and are not one."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names


def _read_origins(shard: ShardFile) -> dict[str, RowRanges] | None:
    """Read the rows that a shard lists; None if it cannot be read."""
    try:
        return CacheShard(shard.path).rows_by_store()
    except (OSError, ValueError):
        return None


def _open_shard(path: Path) -> CacheShard:
    try:
        return CacheShard(path)
    except (OSError, ValueError) as error:
        problem = f"{path} was removed from the reference cache or damaged during this run ({error})"
        hint = (
            "rerun with resume_from_checkpoint=auto to score the missing pairs again, or set reference.cache_dir to a "
            "directory that all nodes share"
        )
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
    """List what can be removed.

    Partially written or deleted files of killed processes, damaged shards and stores that runs renamed, and files that
    say where the pairs of a store are, if there is a newer one.
    """
    old = time.time() - _MAX_WRITE_SECONDS
    found, partial = partial_stores(stores)
    found += [path for path in partial if _last_written(path) < old]
    found += [path for path in root.glob(".deleted-*") if path.is_dir()] if root.is_dir() else []
    for directory in _directories(root):
        if directory.is_symlink():
            continue  # its target does not belong to the cache
        found += sorted(directory.glob(f"*{DAMAGED}"))
        found += [path for path in sorted(directory.glob(f"{PARTIAL}*")) if _last_written(path) < old]
        newest = {path.name[:32]: path for path in sorted(extents_files(directory), key=_last_written)}
        found += [path for path in set(extents_files(directory)) - {*newest.values()} if _last_written(path) < old]
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
        sum(path.stat().st_size for path in [*(shard.path for shard in shards), *extents_files(directory)]),
        max([last_used, *(shard.created for shard in shards)]),
    )


def _content_problem(shard: ShardFile) -> str | None:
    try:
        num_pairs = len(read_keys(shard.path))
    except (OSError, ValueError) as error:
        return f"is not a shard that this version can read ({error})"
    return None if num_pairs == shard.num_pairs else f"contains {num_pairs} pairs, not {shard.num_pairs} as in its name"
