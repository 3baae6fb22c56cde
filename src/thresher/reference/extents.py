"""Where the rows of a store are in the shards of the cache: sorted extents, however they were found.

A location is the number of a shard, oldest first, and a row in it, in one integer: of several copies of a pair, the one
with the least location is used. A shard lists the rows of the store that it was scored for. Pairs of other shards are
found by their keys, unless all are listed; many keys are partitioned on the disk first. Many extents, and those with
pairs found by keys, are kept in a file next to the shards, which all ranks map, so memory grows neither with the store
nor with the cache.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import re
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from mmap import ACCESS_READ, MADV_DONTNEED, mmap
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
import numpy.typing as npt

from thresher import durable
from thresher.data.store.arrow_schema import find_sorted
from thresher.data.store.reader import HASH_BYTES, HASH_DTYPE, Hashes
from thresher.errors import UserError
from thresher.reference.fingerprint import VerifiedFiles

logger = logging.getLogger(__name__)

Integers = npt.NDArray[np.int64]

ROW_BITS = 32  # of a location
PARTIAL = ".partial-"
# more keys are joined on the disk; more extents, or those of more shards, are kept in a file
MAX_KEYS, MAX_EXTENTS, MAX_SHARDS = 1 << 22, 1 << 16, 1 << 8
_KEYS_PER_PARTITION, _MAX_PARTITIONS = 1 << 20, 1 << 8  # the files of all partitions are open at the same time
_ROWS_PER_WINDOW = 1 << 20
_NAME = re.compile(r"([0-9a-f]{32})-([0-9a-f]{32})-([0-9a-f]{64})\.rows")
_KEYED = np.dtype([("key", HASH_DTYPE), ("at", "<i8")])
_LOCATED = np.dtype([("row", "<i8"), ("at", "<i8")])
_SORTABLE = np.dtype(f"S{HASH_BYTES}")
_EMPTY = np.zeros(0, dtype=np.int64)
_NONE = np.iinfo(np.int64).max


class Rows(Protocol):
    """Examples in a fixed order; of two with the same digest, the shorter one has the first examples of the other."""

    @property
    def digest(self) -> str: ...

    def __len__(self) -> int: ...

    def hashes(self) -> Iterator[Hashes]: ...


@dataclass(frozen=True)
class RowRanges:
    """Which rows of a store a shard has: counts[i] rows from store_rows[i] on, at shard_rows[i]."""

    shard_rows: Integers
    store_rows: Integers
    counts: Integers


class Extents:
    """The rows of a store, divided into extents: the first row of each, and its location or -1."""

    def __init__(self, num_rows: int, records: Integers, path: Path | None = None) -> None:
        self.num_rows = num_rows
        self._records = records  # [extents, (first row, location)]
        self.path = path

    def __len__(self) -> int:
        return len(self._records)

    def locate(self, rows: Integers) -> Integers:
        """Return the location of each row, or -1."""
        at = np.searchsorted(self._records[:, 0], rows, side="right") - 1
        firsts, locations = self._records[at].T
        self._release()
        return np.where(locations < 0, -1, locations + (rows - firsts))

    def between(self, start: int, stop: int) -> Integers:
        """Return the locations of consecutive rows."""
        firsts, stops, locations = self._overlapping(start, stop)
        counts = stops - firsts
        has = np.repeat(locations >= 0, counts)
        return np.where(has, np.repeat(locations - firsts, counts) + np.arange(start, stop), -1)

    def found_between(self, start: int, stop: int, numbers: Integers) -> tuple[Integers, Integers, Integers]:
        """Return first rows, ends and locations of the extents that have one.

        numbers: the new one of each shard, or -1 if it is lost.
        """
        firsts, stops, locations = self._overlapping(start, stop)
        shards, rows = np.divmod(locations, 1 << ROW_BITS)
        has = (locations >= 0) & (numbers[shards] >= 0)
        return firsts[has], stops[has], (numbers[shards[has]] << ROW_BITS) + rows[has]

    def chunks(self) -> Iterator[tuple[Integers, Integers]]:
        """Yield the number of rows and the location of each extent, some extents at a time."""
        for at in range(0, len(self), _ROWS_PER_WINDOW):
            self._release()
            chunk = self._records[at : at + _ROWS_PER_WINDOW]
            following = self._records[at + len(chunk) : at + len(chunk) + 1, 0]
            yield np.diff(chunk[:, 0], append=following if len(following) else self.num_rows), chunk[:, 1]

    def _overlapping(self, start: int, stop: int) -> tuple[Integers, Integers, Integers]:
        """Return first rows, ends and locations of the extents of some rows, cut to these."""
        first, last = np.searchsorted(self._records[:, 0], [start, stop])
        # the extent before may reach into these rows
        firsts, locations = np.array(self._records[max(0, first - 1) : last]).T
        self._release()
        moved = np.maximum(start - firsts, 0)
        stops = np.append(firsts[1:], stop)[: len(firsts)]
        has_rows = stops > start
        firsts, locations = firsts + moved, np.where(locations < 0, -1, locations + moved)
        return firsts[has_rows], stops[has_rows], locations[has_rows]

    def _release(self) -> None:
        """Drop the pages of the file that are in memory: those that stay would add up to all of it."""
        if isinstance(self._records.base, mmap):
            self._records.base.madvise(MADV_DONTNEED)

    def __reduce__(self) -> tuple[Any, ...]:
        # a memory map cannot be pickled; the receiving process maps the file again
        if self.path is not None:
            return _map_again, (self.path,)
        return type(self), (self.num_rows, np.array(self._records))


def build_extents(
    directory: Path,
    rows: Rows,
    shards: Mapping[str, int],
    read_ranges: Callable[[Sequence[str]], Mapping[str, RowRanges]],
    read_keys: Callable[[str], Hashes],
    verified: VerifiedFiles,
) -> Extents:
    """Find the rows in all shards of a directory.

    Args:
        directory: where the shards are; the extents of other shards that it has are extended, without lost shards.
        rows: the rows to find.
        shards: names of the shards, oldest first, and how many pairs each has.
        read_ranges: returns the rows that some shards list, of those that list them.
        read_keys: returns the keys of a shard.
        verified: what has been verified in the directory.
    """
    numbers = {name: number for number, name in enumerate(shards)}
    kept = _kept_extents(directory, rows, shards, verified)
    if kept and set(kept[-1][1]) == shards.keys():
        return kept[-1][0]
    of_kept = [(extents, np.array([numbers.get(name, -1) for name in names], np.int64)) for extents, names in kept]
    # without a lost shard, its rows may be in others, which are searched again
    searched = [names for _, names in kept if shards.keys() >= set(names)]
    added = sorted(shards.keys() - set().union(*searched))
    ranges = read_ranges(added)
    listed = _ListedRows([(numbers[name], each) for name, each in ranges.items()])
    others = [name for name in added if name not in ranges]

    def merged(joined: Joined) -> Integers:
        start, stop, found, locations = joined
        sources = [(found, found + 1, locations), listed.between(start, stop)]
        sources += [extents.found_between(start, stop, each) for extents, each in of_kept]
        return merge_extents(start, stop, *(np.concatenate(each) for each in zip(*sources, strict=True)))

    def kept_with(windows: Iterable[Joined], num_hashes: int = 0) -> Extents:
        with _Sink(directory, rows, list(shards)) as sink:
            for window in windows:
                sink.add(merged(window), is_kept=len(window[2]) > 0 or num_hashes > MAX_KEYS)
            return sink.finish()

    step = _ROWS_PER_WINDOW if any(len(extents) > MAX_EXTENTS for extents, _ in kept) else max(1, len(rows))
    windows = [(at, min(at + step, len(rows)), _EMPTY, _EMPTY) for at in range(0, len(rows), step)]
    # if all rows are listed, other shards are not searched. Rows that a run has once found there have been kept, so a
    # run that scored them at the same time, and lists them, does not change what the first one reads
    if not others or all((merged(window)[:, 1] >= 0).all() for window in windows):
        return kept_with(windows)
    num_keys = sum(shards[name] for name in others)
    keys = ((numbers[name] << ROW_BITS, read_keys(name)) for name in others)
    if num_keys <= MAX_KEYS:
        return kept_with(_join_in_memory(rows, keys), num_keys + len(rows))
    with _workspace(directory) as workspace:
        return kept_with(_join_on_disk(rows, keys, num_keys, workspace), num_keys + len(rows))


def merge_extents(start: int, stop: int, firsts: Integers, stops: Integers, locations: Integers) -> Integers:
    """Divide rows into extents [extents, (first row, location or -1)]; where several overlap, the least is used."""
    if (firsts[1:] < firsts[:-1]).any():
        order = np.argsort(firsts, kind="stable")
        firsts, stops, locations = firsts[order], stops[order], locations[order]
    if (firsts[1:] < stops[:-1]).any():
        cuts = np.unique(np.concatenate([firsts, stops]))
        begin = np.searchsorted(cuts, firsts)
        counts = np.searchsorted(cuts, stops) - begin
        pieces = np.repeat(begin - (np.cumsum(counts) - counts), counts) + np.arange(int(counts.sum()))
        least = np.full(len(cuts), _NONE)
        np.minimum.at(least, pieces, np.repeat(locations - firsts, counts) + cuts[pieces])
        has = least[:-1] < _NONE
        firsts, stops, locations = cuts[:-1][has], cuts[1:][has], least[:-1][has]
    before, after = np.append(start, stops), np.append(firsts, stop)
    num_gaps = np.cumsum(before < after)
    gaps = np.flatnonzero(before < after)
    records = np.empty((len(firsts) + len(gaps), 2), dtype=np.int64)
    at = np.arange(len(firsts)) + num_gaps[:-1]
    records[at, 0], records[at, 1] = firsts, locations
    at = gaps + num_gaps[gaps] - 1
    records[at, 0], records[at, 1] = before[gaps], -1
    continues = (np.diff(records[:, 0]) == np.diff(records[:, 1])) & (records[:-1, 1] >= 0)
    merged: Integers = records[np.append([True], ~continues)[: len(records)]]
    return merged


class _ListedRows:
    """The rows that shards list, in order of the store."""

    def __init__(self, of_shards: Sequence[tuple[int, RowRanges]]) -> None:
        firsts = np.concatenate([_EMPTY, *(each.store_rows for _, each in of_shards)])
        counts = np.concatenate([_EMPTY, *(each.counts for _, each in of_shards)])
        locations = np.concatenate([_EMPTY, *((shard << ROW_BITS) + each.shard_rows for shard, each in of_shards)])
        order = np.argsort(firsts, kind="stable")
        self._firsts, self._stops, self._locations = firsts[order], (firsts + counts)[order], locations[order]
        self._longest = int(counts.max(initial=0))

    def between(self, start: int, stop: int) -> tuple[Integers, Integers, Integers]:
        """Return first rows, ends and locations, cut to some rows."""
        begin, end = np.searchsorted(self._firsts, [start - self._longest, stop])
        firsts, stops = np.maximum(self._firsts[begin:end], start), np.minimum(self._stops[begin:end], stop)
        locations = self._locations[begin:end] + (firsts - self._firsts[begin:end])
        has_rows = firsts < stops
        return firsts[has_rows], stops[has_rows], locations[has_rows]


Joined = tuple[int, int, Integers, Integers]  # a range of rows, from and to; those found, ascending; their locations


def _join_in_memory(rows: Rows, keys: Iterable[tuple[int, Hashes]]) -> Iterator[Joined]:
    table = _KeyTable(np.concatenate([_keyed(*each) for each in keys]))
    for start, hashes in _numbered(rows):
        locations = table.find(hashes)
        found = np.flatnonzero(locations >= 0)
        yield start, start + len(hashes), start + found, locations[found]


def _join_on_disk(rows: Rows, keys: Iterable[tuple[int, Hashes]], num_keys: int, directory: Path) -> Iterator[Joined]:
    """Partition both sides by key, join each partition, and partition what was found by row."""
    bits = min(_MAX_PARTITIONS.bit_length() - 1, (max(num_keys, len(rows)) // _KEYS_PER_PARTITION).bit_length())
    first_bits, num_partitions = np.uint64(64 - bits), 1 << bits

    def by_key(keyed: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
        return _halves(keyed["key"])[0] >> first_bits if bits else np.zeros(len(keyed), np.uint64)

    _partition((_keyed(*each) for each in keys), by_key, num_partitions, directory / "keys")
    _partition((_keyed(*each) for each in _numbered(rows)), by_key, num_partitions, directory / "rows")

    def joined() -> Iterator[npt.NDArray[Any]]:
        for number in range(num_partitions):
            table = _KeyTable(_take(directory / f"keys-{number}", _KEYED))
            wanted = _take(directory / f"rows-{number}", _KEYED)
            locations = table.find(wanted["key"])
            located = np.empty(len(wanted), _LOCATED)
            located["row"], located["at"] = wanted["at"], locations
            yield located[locations >= 0]

    step = max(_ROWS_PER_WINDOW, -(-len(rows) // _MAX_PARTITIONS))
    windows = range(0, len(rows), step)
    _partition(joined(), lambda located: located["row"] // step, len(windows), directory / "found")
    for number, start in enumerate(windows):
        located = _take(directory / f"found-{number}", _LOCATED)
        located = located[np.argsort(located["row"])]
        yield start, min(start + step, len(rows)), located["row"].copy(), located["at"].copy()


def _numbered(rows: Rows) -> Iterator[tuple[int, Hashes]]:
    """Yield the hashes of some rows at a time, with the number of the first."""
    start = 0
    for hashes in rows.hashes():
        yield start, hashes
        start += len(hashes)


def _keyed(first: int, keys: Hashes) -> npt.NDArray[Any]:
    """Number keys from the first on."""
    keyed = np.empty(len(keys), _KEYED)
    keyed["key"], keyed["at"] = keys, np.arange(first, first + len(keys))
    return keyed


def _halves(keys: Hashes) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    halves = np.ascontiguousarray(keys).view("<u8")
    return halves[::2].copy(), halves[1::2].copy()


def _partition(
    chunks: Iterable[npt.NDArray[Any]],
    number_of: Callable[[npt.NDArray[Any]], npt.NDArray[Any]],
    count: int,
    path: Path,
) -> None:
    """Append each record to the file of its partition, in order."""
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(path.with_name(f"{path.name}-{number}").open("wb")) for number in range(count)]
        for records in chunks:
            numbers = number_of(records).astype(np.uint16)  # sorts in linear time
            ends = np.cumsum(np.bincount(numbers, minlength=count))
            for number, part in enumerate(np.split(records[np.argsort(numbers, kind="stable")], ends[:-1])):
                part.tofile(files[number])


def _take(path: Path, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Read a partition, and free its space."""
    records = np.fromfile(path, dtype)
    path.unlink()
    return records


class _KeyTable:
    """Distinct keys in sorted order, each with its least location."""

    def __init__(self, keyed: npt.NDArray[Any]) -> None:
        # half of a key sorts ten times faster, and tells keys apart unless somebody has chosen them
        self._by_half = True
        firsts, seconds = _halves(keyed["key"])
        order = np.argsort(firsts)
        groups = _group_starts(firsts[order])
        seconds = seconds[order]
        if (seconds != np.repeat(seconds[groups], np.diff(groups, append=len(order)))).any():
            self._by_half = False
            order = np.argsort(self._sortable(keyed["key"]))
            groups = _group_starts(self._sortable(keyed["key"])[order])
        self._keys = keyed["key"][order[groups]]
        self._sorted = self._sortable(self._keys)
        self._locations = np.minimum.reduceat(keyed["at"][order], groups) if len(groups) else _EMPTY

    def _sortable(self, keys: Hashes) -> npt.NDArray[Any]:
        return _halves(keys)[0] if self._by_half else np.ascontiguousarray(keys).view(_SORTABLE)

    def find(self, keys: Hashes) -> Integers:
        """Return the location of each key, or -1."""
        at = find_sorted(self._sortable(keys), self._sorted)
        has = np.flatnonzero(at >= 0)
        has = has[self._keys[at[has]] == keys[has]]
        locations = np.full(len(keys), -1, dtype=np.int64)
        locations[has] = self._locations[at[has]]
        return locations


def _group_starts(in_order: npt.NDArray[Any]) -> Integers:
    """Return where each run of equal values begins."""
    return np.flatnonzero(np.append([True], in_order[1:] != in_order[:-1])[: len(in_order)])


@contextlib.contextmanager
def _workspace(directory: Path) -> Iterator[Path]:
    """Make a temporary directory next to the shards, or elsewhere if that is read-only."""
    try:
        path = Path(tempfile.mkdtemp(prefix=PARTIAL, dir=directory))
    except OSError:
        path = Path(tempfile.mkdtemp(prefix="thresher-"))
    try:
        with durable.translate_os_errors(f"could not join the keys of the reference cache in {path}"):
            yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


class _Sink:
    """Collects the extents of a store: in memory, or in a file if there are many."""

    def __init__(self, directory: Path, rows: Rows, shards: Sequence[str]) -> None:
        self._directory, self._rows, self._shards = directory, rows, shards
        self._records: list[Integers] = []
        self._num_records = self._num_written = 0
        self._file: IO[bytes] | None = None
        self._has_failed = False
        self._temporary: Path | None = None
        self._sha256 = hashlib.sha256()

    def __enter__(self) -> _Sink:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()
        if self._temporary is not None:
            self._temporary.unlink(missing_ok=True)

    def add(self, records: Integers, *, is_kept: bool) -> None:
        """Add extents in order; `is_kept` writes a file even if there are few."""
        self._records.append(records)
        self._num_records += len(records)
        if self._has_failed:
            return
        if is_kept or self._file or self._num_records > MAX_EXTENTS or len(self._shards) > MAX_SHARDS:
            try:
                self._file = self._file or self._open()
                for each in self._records:
                    self._write(self._file, each.tobytes())
                self._num_written = self._num_records
                self._records.clear()
            except OSError as error:
                self._keep_in_memory(error)

    def _open(self) -> IO[bytes]:
        temporary = self._directory / f"{PARTIAL}{secrets.token_hex(8)}"
        try:
            file = temporary.open("xb+", buffering=0)
        except OSError:  # a read-only cache: other ranks get the content
            return tempfile.TemporaryFile(buffering=0)
        self._temporary = temporary
        return file

    def _write(self, file: IO[bytes], content: bytes) -> None:
        self._sha256.update(content)
        while content:
            content = content[file.write(content) :]

    def _keep_in_memory(self, error: OSError) -> None:
        """Go on without the file, as on a full disk."""
        logger.warning(
            "reference cache: cannot write a file with the rows of the shards to %s (%s); later starts search again",
            self._directory,
            error.strerror or error,
        )
        self._has_failed = True
        if self._file is not None:
            self._file.seek(0)
            self._records.insert(0, np.fromfile(self._file, "<i8", 2 * self._num_written).reshape(-1, 2))
            self._file.close()
            self._file = None

    def finish(self) -> Extents:
        """Return the extents; publish their file under a name with their rows, their shards and its SHA-256."""
        if self._file is not None:
            try:
                path = self._publish(self._file)
                return Extents(len(self._rows), _mapped(self._file, self._num_records), path)
            except OSError as error:
                self._keep_in_memory(error)
        return Extents(len(self._rows), np.concatenate([np.zeros((0, 2), np.int64), *self._records]))

    def _publish(self, file: IO[bytes]) -> Path | None:
        footer = json.dumps({"num_rows": len(self._rows), "shards": self._shards}).encode()
        self._write(file, footer + len(footer).to_bytes(8, "little"))
        durable.sync_stream(file)
        if self._temporary is None:
            return None
        names = _name_of(self._rows), _short_digest("\n".join(self._shards)), self._sha256.hexdigest()
        path = self._temporary.rename(self._directory / f"{'-'.join(names)}.rows")
        durable.sync_directory(self._directory)
        return path


def _short_digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _name_of(rows: Rows) -> str:
    return _short_digest(f"{rows.digest} {len(rows)}")


def _mapped(file: IO[bytes], num_records: int) -> Integers:
    mapped = mmap(file.fileno(), 16 * num_records, access=ACCESS_READ)
    return np.ndarray((num_records, 2), np.dtype("<i8"), mapped)


def _read_file(path: Path) -> tuple[Extents, list[str]]:
    """Map a file of extents; return them and the names of their shards, or raise ValueError or OSError."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - 8))
        num_bytes = int.from_bytes(file.read(), "little")
        num_records, rest = divmod(size - 8 - num_bytes, 16)
        if num_records < 1 or rest:
            raise ValueError("wrong size")
        file.seek(16 * num_records)
        footer = json.loads(file.read(num_bytes))
        return Extents(footer["num_rows"], _mapped(file, num_records), path), footer["shards"]


def _map_again(path: Path) -> Extents:
    return _read(path)[0]


def _read(path: Path) -> tuple[Extents, list[str]]:
    try:
        return _read_file(path)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path} was removed from the reference cache or damaged ({error}); set reference.cache_dir to a directory "
            "that all nodes share, and rerun with resume_from_checkpoint=auto"
        ) from error


def _kept_extents(
    directory: Path, rows: Rows, shards: Mapping[str, int], verified: VerifiedFiles
) -> list[tuple[Extents, list[str]]]:
    """Return the kept extents of the rows, and in which shards; if one is of exactly these shards, it is the last."""
    found = list[tuple[Path, Extents, list[str]]]()
    for path in extents_files(directory, rows):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            extents, names = _read_file(path)
            if extents.num_rows == len(rows) and shards.keys() & set(names):
                found.append((path, extents, names))
    kept = list[tuple[Extents, list[str]]]()
    for path, extents, names in sorted(found, key=lambda each: set(each[2]) != shards.keys()):
        if verified.find_problem(path, path.stem[-64:]) is None:
            kept.append((extents, names))
            if set(names) == shards.keys():
                return kept
    return kept


def shards_of(path: Path) -> list[str]:
    """Return the names of the shards that a file of extents refers to."""
    return _read(path)[1]


def extents_files(directory: Path, rows: Rows | None = None) -> list[Path]:
    """List the files of extents, or those of some rows."""
    paths = sorted(directory.glob("*.rows")) if directory.is_dir() else []
    found = [(path, _NAME.fullmatch(path.name)) for path in paths]
    return [path for path, match in found if match and (rows is None or match[1] == _name_of(rows))]
