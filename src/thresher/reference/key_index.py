"""Find keys among the pairs of a run: sorted once, searched by whole shards. Pure numpy, no files."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from thresher.data.store import Hashes

Positions = npt.NDArray[np.int64]


class KeyIndex:
    """The keys of a run's pairs, some of which may be the same.

    24 bytes a pair, and as much again while it is built. Sorted by half of the key; the other half decides.
    """

    def __init__(self, keys: Hashes) -> None:
        halves = keys.view("<u8").reshape(-1, 2)
        self._order: Positions = np.argsort(halves[:, 0])
        self._first = halves[self._order, 0]
        self._second = halves[self._order, 1]

    def match(self, keys: Hashes) -> tuple[Positions, Positions]:
        """Return (row in `keys`, position in the run) of every match."""
        halves = keys.view("<u8").reshape(-1, 2)
        # in order, so that the search walks through memory; stable, so that of equal keys the first row comes first
        rows = np.argsort(halves[:, 0], kind="stable")
        at = np.searchsorted(self._first, halves[rows, 0])
        found: list[tuple[Positions, Positions]] = []
        while len(rows):
            inside = at < len(self._first)
            rows, at = rows[inside], at[inside]
            alike = self._first[at] == halves[rows, 0]
            rows, at = rows[alike], at[alike]
            same = self._second[at] == halves[rows, 1]
            found.append((rows[same], self._order[at[same]]))
            at = at + 1  # the same pair may occur in a run many times
        return (
            np.concatenate([rows for rows, _ in found] or [np.zeros(0, np.int64)]),
            np.concatenate([positions for _, positions in found] or [np.zeros(0, np.int64)]),
        )
