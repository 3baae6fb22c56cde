"""Data-quality findings, length bias, and leaks between two stores; `duplicates` finds repeats within one.

Findings are reported and the pairs kept. Pairs are compared by the first 64 bits of their hashes: with 100 million
pairs, a false match occurs once in thousands of runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from thresher.data.store.arrow_schema import find_sorted
from thresher.data.store.reader import Hashes, PairStore

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


def find_leaks(store: PairStore, other: PairStore) -> tuple[Finding, Finding]:
    """Find pairs and prompts of `store` that are also in `other`; training and validation should share none.

    Time O((n + m) log m) for n pairs against m; memory 8 m bytes plus one shard of each.
    """
    return _find_leaks("leaked_pairs", "hash", store, other), _find_leaks("leaked_prompts", "prompt_hash", store, other)


def _find_leaks(name: str, column: str, store: PairStore, other: PairStore) -> Finding:
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
