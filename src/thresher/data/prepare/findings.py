"""Data-quality findings: repeats within a store, leaks between two stores, length bias.

Findings are reported and the pairs kept. Pairs are compared by the first 64 bits of their hashes: with 100 million
pairs, a false match occurs once in thousands of runs.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from thresher import durable
from thresher.data.store.arrow_schema import find_sorted
from thresher.data.store.joined import Stores
from thresher.data.store.reader import Hashes
from thresher.data.store.writer import open_at

Keys = npt.NDArray[np.uint64]
NUM_EXAMPLES = 5


@dataclass(frozen=True)
class Finding:
    """A kind of suspicious pairs: their count and the numbers of the first few."""

    name: str
    count: int = 0
    examples: tuple[int, ...] = ()

    def with_more(self, pairs: npt.NDArray[Any]) -> Finding:
        """Return a finding that includes `pairs` (ascending); the lowest numbers are the examples."""
        lowest = sorted([*self.examples, *pairs[:NUM_EXAMPLES].tolist()])[:NUM_EXAMPLES]
        return Finding(self.name, self.count + len(pairs), tuple(lowest))


@dataclass(frozen=True)
class LengthBias:
    """Difference in response length between the sides: fractions of pairs, and means in tokens."""

    share_chosen_longer: float
    share_equal: float
    mean_chosen: float
    mean_rejected: float


def to_keys(hashes: Sequence[bytes] | Hashes) -> Keys:
    """Truncate 16-byte hashes to 64 bits."""
    joined = b"".join(hashes) if not isinstance(hashes, np.ndarray) else hashes.tobytes()
    return np.frombuffer(joined, dtype="<u8")[::2].copy()


def find_leaks(store: Stores, other: Stores) -> tuple[Finding, Finding]:
    """Find pairs and prompts of `store` that are also in `other`; training and validation should share none.

    Time O((n + m) log m) for n pairs against m; memory 8 m bytes plus one shard of each.
    """
    return _find_leaks("leaked_pairs", "hash", store, other), _find_leaks("leaked_prompts", "prompt_hash", store, other)


def _find_leaks(name: str, column: str, store: Stores, other: Stores) -> Finding:
    known = np.empty(len(other), dtype=np.uint64)
    filled = 0
    for hashes in other.hashes(column):
        known[filled : filled + len(hashes)] = to_keys(hashes)
        filled += len(hashes)
    # sorted once, in place: np.isin would sort again for every shard, and np.unique would copy
    known.sort()
    leaks, start = Finding(name), 0
    for hashes in store.hashes(column):
        leaks = leaks.with_more(np.flatnonzero(find_sorted(to_keys(hashes), known) >= 0) + start)
        start += len(hashes)
    return leaks


KEYS_PER_PARTITION = 1 << 18
# each partition is an open file while it is written; 1024 open files are a common limit
MAX_PARTITIONS = 256
_KEY_DTYPE = np.dtype("<u8")
_ENTRY_DTYPE = np.dtype([("key", _KEY_DTYPE), ("pair", _KEY_DTYPE)])


class SpilledKeys:
    """The keys of all pairs, and their keys with the sides exchanged, in two files of a directory, in pair order.

    There may be more pairs than fit into memory. To compare them, each file is partitioned by key: equal keys are in
    the same partition, and a partition is small enough to sort. The files already have `num_pairs` pairs; anything
    after them is truncated.
    """

    def __init__(self, directory: Path, num_pairs: int = 0) -> None:
        self._num_pairs = num_pairs
        self._paths = [directory / "keys.bin", directory / "swapped_keys.bin"]
        self._streams = [open_at(path, num_pairs * _KEY_DTYPE.itemsize) for path in self._paths]

    def append(self, keys: Keys, swapped_keys: Keys) -> None:
        for stream, values in zip(self._streams, (keys, swapped_keys), strict=True):
            stream.write(values.astype(_KEY_DTYPE).tobytes())
        self._num_pairs += len(keys)

    def sync(self) -> None:
        """Flush all keys to the disk."""
        for stream in self._streams:
            durable.sync_stream(stream)

    def close(self) -> None:
        for stream in self._streams:
            stream.close()

    def find_repeats(self) -> tuple[Finding, Finding]:
        """Find pairs that repeat an earlier one, and pairs that also occur with their sides exchanged."""
        for stream in self._streams:
            stream.flush()
        num_partitions = min(MAX_PARTITIONS, -(-self._num_pairs // KEYS_PER_PARTITION))
        duplicates, contradictions = Finding("duplicates"), Finding("contradictions")
        for pairs, swapped in zip(*(_partitions(path, num_partitions) for path in self._paths), strict=True):
            is_repeat = np.ones(len(pairs), dtype=np.bool_)
            # a partition is in pair order, and np.unique returns the first of equal keys
            is_repeat[np.unique(pairs["key"], return_index=True)[1]] = False
            duplicates = duplicates.with_more(pairs["pair"][is_repeat])
            contradictions = contradictions.with_more(swapped["pair"][np.isin(swapped["key"], pairs["key"])])
        return duplicates, contradictions


def _partitions(path: Path, num_partitions: int) -> Iterator[npt.NDArray[Any]]:
    """Partition a file of keys by key into temporary files next to it; yield the (key, pair) entries of each."""
    with tempfile.TemporaryDirectory(dir=path.parent) as directory:
        partitions = [Path(directory) / str(number) for number in range(num_partitions)]
        _write_partitions(path, partitions)
        for partition in partitions:
            yield np.fromfile(partition, dtype=_ENTRY_DTYPE)


def _write_partitions(path: Path, partitions: Sequence[Path]) -> None:
    # a function: its arrays are freed before the partitions are read
    first = 0
    with ExitStack() as stack:
        streams = [stack.enter_context(partition.open("wb")) for partition in partitions]
        # read, not mapped: mapped pages would count as memory of this process
        stored = stack.enter_context(path.open("rb"))
        while len(keys := np.fromfile(stored, dtype=_KEY_DTYPE, count=KEYS_PER_PARTITION)):
            entries = np.empty(len(keys), dtype=_ENTRY_DTYPE)
            entries["key"] = keys
            entries["pair"] = np.arange(first, first + len(keys), dtype=_KEY_DTYPE)
            first += len(keys)
            number = keys % np.uint64(len(streams))
            order = np.argsort(number, kind="stable")  # stable: a partition stays in pair order
            ends = np.cumsum(np.bincount(number.astype(np.int64), minlength=len(streams)))
            for stream, selected in zip(streams, np.split(entries[order], ends[:-1]), strict=True):
                stream.write(selected.tobytes())
