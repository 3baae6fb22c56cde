"""Hold out a share of a store's pairs: which side a pair is on follows from its prompt and a seed alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Keys = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class Split:
    """One side of a split by prompt: the share that is held out, or the rest.

    Pairs of one prompt are on the same side, whatever the order of files, and stay there when pairs are added.
    """

    share: float
    seed: int
    held_out: bool

    def select(self, prompt_hashes: npt.NDArray[np.void]) -> npt.NDArray[np.int64]:
        """Return the numbers of the pairs on this side, ascending; at least one prompt is held out."""
        keys = _mix(prompt_hashes.view("<u8")[::2], self.seed)
        limit = np.uint64(min(int(self.share * 2.0**64), 2**64 - 1))
        is_held_out = keys <= max(limit, keys.min())
        return np.flatnonzero(is_held_out if self.held_out else ~is_held_out)


def _mix(hashes: npt.NDArray[Any], seed: int) -> Keys:
    """Mix hashes with a seed: the finalizer of SplitMix64 (Steele et al., 2014), a bijection of 64 bits."""
    keys = hashes.astype(np.uint64) + np.uint64((seed + 1) * 0x9E3779B97F4A7C15 % 2**64)
    keys = (keys ^ (keys >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    keys = (keys ^ (keys >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(keys ^ (keys >> np.uint64(31)), dtype=np.uint64)
