"""Held-out splits of a store: which rows each side has, decided by prompt and seed alone.

The rows of the held-out side are computed once and written to a file, which every process of a run maps: 4 bytes per
held-out pair, and nothing per pair of training.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from thresher import durable

logger = logging.getLogger(__name__)

Keys = npt.NDArray[np.uint64]
Ids = npt.NDArray[np.int64]
Lengths = npt.NDArray[np.uint32]
# _VERSION, pairs of the store, held-out ones, longest example of training, and of the held-out side; it is followed by
# the SHA-256 of header and rows, and by the rows
_HEADER = np.dtype("<i8")
_VERSION, _NUM_FIELDS = 1, 5
_ROWS_PER_BLOCK = 1 << 20


@dataclass(frozen=True)
class Split:
    """One side of a split by prompt: the share that is held out, or the rest; decided by prompt and seed alone.

    Pairs of one prompt are on the same side, whatever the order of files, and stay there when pairs are added.
    """

    share: float
    seed: int
    held_out: bool

    def held_out_rows(self, prompt_hashes: Iterable[npt.NDArray[np.void]]) -> Ids:
        """Return the held-out rows, ascending, given the hashes of one shard at a time; at least one prompt's."""
        limit = min(int(self.share * 2.0**64), 2**64 - 1)
        found, start = list[tuple[int, Ids]](), 0
        for hashes in prompt_hashes:
            keys = _mix(hashes.view("<u8")[::2], self.seed)
            least = int(keys.min(initial=2**64 - 1))
            found.append((least, start + np.flatnonzero(keys <= np.uint64(max(limit, least)))))
            start += len(keys)
        limit = max(limit, min(least for least, _ in found))
        return np.concatenate([rows for least, rows in found if least <= limit])


def _mix(hashes: npt.NDArray[Any], seed: int) -> Keys:
    """Mix hashes with a seed: the finalizer of SplitMix64 (Steele et al., 2014), a bijection of 64 bits."""
    keys = hashes.astype(np.uint64) + np.uint64((seed + 1) * 0x9E3779B97F4A7C15 % 2**64)
    keys = (keys ^ (keys >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    keys = (keys ^ (keys >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(keys ^ (keys >> np.uint64(31)), dtype=np.uint64)


@dataclass(frozen=True, eq=False)
class SplitRows:
    """The rows of both sides of a split, numbered in the store; pairs are numbered within their side."""

    before: npt.NDArray[Any]  # of each held-out pair, ascending: how many pairs before it are on the other side
    num_pairs: int  # of the store
    longest: tuple[int, int]  # tokens of the longest example of training and of the held-out side, 0 for an empty side

    @classmethod
    def of(cls, held_out: Ids, lengths: Lengths) -> SplitRows:
        """Compute what is kept of the held-out rows of a store with these lengths."""
        num_pairs, longest, start = len(lengths), [0, 0], 0
        for block in in_blocks(lengths):
            tokens = longest_sequences(block)
            first, last = np.searchsorted(held_out, [start, start + len(block)])
            here = held_out[first:last] - start
            longest[1] = max(longest[1], int(tokens[here].max(initial=0)))
            tokens[here] = 0
            longest[0] = max(longest[0], int(tokens.max()))
            start += len(block)
        before = (held_out - np.arange(len(held_out))).astype(_dtype_of_rows(num_pairs))
        return cls(before, num_pairs, (longest[0], longest[1]))

    @classmethod
    def map(cls, path: Path, num_pairs: int) -> SplitRows | None:
        """Map a file; None if there is none of this store and version, or if it is damaged."""
        try:
            with path.open("rb") as file:
                header, digest = file.read(_NUM_FIELDS * _HEADER.itemsize), file.read(hashlib.sha256().digest_size)
                version, stored_pairs, num_held_out, *longest = np.frombuffer(header, _HEADER).tolist()
                if (version, stored_pairs) != (_VERSION, num_pairs):
                    return None
                before = np.memmap(file, _dtype_of_rows(num_pairs), "r", file.tell())
        except (OSError, ValueError):
            return None
        if len(before) != num_held_out or _digest(header, before) != digest:
            logger.warning("%s is damaged; the held-out pairs are computed again", path)
            return None
        return cls(before, num_pairs, (longest[0], longest[1]))

    def write(self, path: Path) -> None:
        """Write the file that `map` reads; without it, every process computes the rows."""
        header = np.array([_VERSION, self.num_pairs, len(self.before), *self.longest], _HEADER).tobytes()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_name(f".{path.name}-{secrets.token_hex(8)}")  # ranks may write the same
            durable.replace(path, header + _digest(header, self.before) + self.before.tobytes(), temporary=temporary)
        except OSError as error:
            logger.info("cannot write %s (%s); every process computes the held-out pairs", path, error)


def _digest(header: bytes, before: npt.NDArray[Any]) -> bytes:
    digest = hashlib.sha256(header)
    digest.update(np.ascontiguousarray(before).data)
    return digest.digest()


def _dtype_of_rows(num_pairs: int) -> np.dtype[Any]:
    return np.dtype("<u4" if num_pairs < 2**32 else "<i8")


@dataclass(frozen=True, eq=False)
class Side:
    """One side of a split."""

    rows: SplitRows
    is_held_out: bool

    def __len__(self) -> int:
        num_held_out = len(self.rows.before)
        return num_held_out if self.is_held_out else self.rows.num_pairs - num_held_out

    @property
    def longest_example(self) -> int:
        return self.rows.longest[self.is_held_out]

    def rows_of(self, ids: Ids) -> Ids:
        """Return the row in the store of each pair."""
        before = self.rows.before
        rows = np.empty(len(ids), dtype=np.int64)
        if self.is_held_out:
            np.add(ids, before[ids], out=rows)
            return rows
        # sorted: a search at random positions waits for memory at every step
        order = np.argsort(ids)
        in_order = ids.take(order)
        rows[order] = in_order + np.searchsorted(before, in_order.astype(before.dtype), side="right")
        return rows

    def select(self, values: npt.NDArray[Any], start: int) -> npt.NDArray[Any]:
        """Return the values of this side's pairs, given those of consecutive rows of the store."""
        before = self.rows.before
        numbers = range(len(before))
        first, last = (
            bisect_left(numbers, row, key=lambda number: int(before[number]) + number)
            for row in (start, start + len(values))
        )
        held_out = before[first:last] + np.arange(first - start, last - start)
        return values[held_out] if self.is_held_out else np.delete(values, held_out)


class IndexedLengths:
    """Lengths that are looked up when they are indexed, like the rows of an array."""

    def __init__(self, size: int, of: Callable[[Ids], Lengths]) -> None:
        self._size, self._of = size, of

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, key: Any) -> Lengths:
        ids, *columns = key if isinstance(key, tuple) else (key,)
        if isinstance(ids, slice):
            ids = np.arange(*ids.indices(self._size), dtype=np.int64)
        return self._of(ids)[(slice(None), *columns)]

    def take(self, ids: Ids, **_: Any) -> Lengths:
        """What np.take calls."""
        return self._of(np.asarray(ids))

    def __array__(self, *_: Any, **__: Any) -> Lengths:
        return self[:]


def longest_sequences(lengths: Lengths) -> Ids:
    """Return the tokens of each example's longest sequence: its prompt with its longest response."""
    prompt, *responses = np.ascontiguousarray(lengths.T)
    tokens: Ids = prompt.astype(np.int64) + np.max(responses, axis=0)
    return tokens


def in_blocks(lengths: Lengths) -> Iterator[Lengths]:
    """Yield lengths of consecutive examples: those of all may not fit into memory."""
    for start in range(0, len(lengths), _ROWS_PER_BLOCK):
        yield lengths[start : start + _ROWS_PER_BLOCK]
