"""Pairs that occur twice, or the other way round, among more pairs than memory holds.

Keys lie in two files in the order of the pairs. To compare them, each file is dealt out by key into parts small enough
to sort: equal keys meet in the same part.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from thresher import durable
from thresher.data.prepare.findings import Finding, Keys
from thresher.data.store.staging import open_at

KEYS_PER_PART = 1 << 18
# each part is an open file while keys are dealt out; common limits allow 1024 of them
MAX_PARTS = 256
_KEY_DTYPE = np.dtype("<u8")
_DEALT_DTYPE = np.dtype([("key", _KEY_DTYPE), ("pair", _KEY_DTYPE)])


class SpilledKeys:
    """Keep the keys of pairs, and those that they would have with their sides exchanged, in files of a directory.

    num_pairs: how many pairs the files hold already; what follows them is cut off.
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
        """Bring all keys to the disk."""
        for stream in self._streams:
            durable.sync_stream(stream)

    def close(self) -> None:
        for stream in self._streams:
            stream.close()

    def find_repeats(self) -> tuple[Finding, Finding]:
        """Find pairs that occurred before (same prompt and sides), and pairs that another says the other way round."""
        for stream in self._streams:
            stream.flush()
        num_parts = min(MAX_PARTS, -(-self._num_pairs // KEYS_PER_PART))
        duplicates, contradictions = Finding("duplicates"), Finding("contradictions")
        with ExitStack() as stack:
            dealt = [stack.enter_context(_Dealt(path, num_parts)) for path in self._paths]
            for pairs, swapped in zip(*dealt, strict=True):
                is_repeat = np.ones(len(pairs), dtype=np.bool_)
                # pairs of a part are in order, and np.unique returns the first of equals
                is_repeat[np.unique(pairs["key"], return_index=True)[1]] = False
                duplicates = duplicates.with_more(pairs["pair"][is_repeat])
                contradictions = contradictions.with_more(swapped["pair"][np.isin(swapped["key"], pairs["key"])])
        return duplicates, contradictions


class _Dealt:
    """A file of keys dealt out by key into parts beside it; iterating yields the keys and pair numbers of each."""

    def __init__(self, path: Path, num_parts: int) -> None:
        self._path = path
        self._parts = [path.with_name(f"{path.name}.{number}") for number in range(num_parts)]

    def __enter__(self) -> _Dealt:
        with ExitStack() as stack:
            streams = [stack.enter_context(part.open("wb")) for part in self._parts]
            for dealt in _read_numbered(self._path):
                number = dealt["key"] % np.uint64(len(streams))
                order = np.argsort(number, kind="stable")  # stable: within a part pairs stay in order
                ends = np.cumsum(np.bincount(number.astype(np.int64), minlength=len(streams)))
                for stream, part in zip(streams, np.split(dealt[order], ends[:-1]), strict=True):
                    stream.write(part.tobytes())
        return self

    def __exit__(self, *_: object) -> None:
        for part in self._parts:
            part.unlink(missing_ok=True)

    def __iter__(self) -> Iterator[npt.NDArray[Any]]:
        for part in self._parts:
            yield np.fromfile(part, dtype=_DEALT_DTYPE)


def _read_numbered(path: Path) -> Iterator[npt.NDArray[Any]]:
    # read, not mapped: mapped pages would count as memory of this process
    first = 0
    with path.open("rb") as stream:
        while len(keys := np.fromfile(stream, dtype=_KEY_DTYPE, count=KEYS_PER_PART)):
            dealt = np.empty(len(keys), dtype=_DEALT_DTYPE)
            dealt["key"] = keys
            dealt["pair"] = np.arange(first, first + len(keys), dtype=_KEY_DTYPE)
            first += len(keys)
            yield dealt
