"""What is odd about a set of pairs, in words: findings, bias of length; and what leaks from one set into another.

Nothing is dropped here; identical and empty sides are dropped, and counted, before a pair is kept. Pairs are
told apart by the first 64 bits of their hashes: in 100 million pairs a false match once in thousands of runs.
Repeats within a set are found in `repeats`.
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
    """Pairs to look at: how many there are, and the numbers of the first few."""

    name: str
    count: int = 0
    examples: tuple[int, ...] = ()

    def with_more(self, pairs: npt.NDArray[Any]) -> Finding:
        """Count more pairs; the lowest numbers stay as examples. pairs: in ascending order."""
        lowest = sorted([*self.examples, *pairs[:NUM_EXAMPLES].tolist()])[:NUM_EXAMPLES]
        return Finding(self.name, self.count + len(pairs), tuple(lowest))


@dataclass(frozen=True)
class LengthBias:
    """How far length alone tells the sides apart, in tokens of the responses."""

    share_chosen_longer: float
    share_equal: float
    mean_chosen: float
    mean_rejected: float


def to_keys(hashes: Sequence[bytes] | Hashes) -> Keys:
    """Shorten 16-byte hashes to 64 bits."""
    joined = b"".join(hashes) if not isinstance(hashes, np.ndarray) else hashes.tobytes()
    return np.frombuffer(joined, dtype="<u8")[::2].copy()


def find_leaks(store: PairStore, other: PairStore) -> tuple[Finding, Finding]:
    """Find pairs, and prompts, of `store` that are also in `other`; training and evaluation should share none.

    O((n + m) log m) for n pairs against m, and 8 m bytes plus one shard of each.
    """
    return _find_leaks("leaked_pairs", "hash", store, other), _find_leaks("leaked_prompts", "prompt_hash", store, other)


def _find_leaks(name: str, column: str, store: PairStore, other: PairStore) -> Finding:
    known = np.empty(len(other), dtype=np.uint64)
    filled = 0
    for hashes in other.hashes(column):
        known[filled : filled + len(hashes)] = to_keys(hashes)
        filled += len(hashes)
    # sorted once and in place: np.isin would sort the known keys again for every shard, np.unique would copy them
    known.sort()
    leaks, start = Finding(name), 0
    for hashes in store.hashes(column):
        leaks = leaks.with_more(np.flatnonzero(find_sorted(to_keys(hashes), known) >= 0) + start)
        start += len(hashes)
    return leaks
