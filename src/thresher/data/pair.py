"""A micro-batch of pairs as ragged tokens: what the data side hands to a layout.

Nothing here is padded or interleaved; arranging tokens for a model is a layout's decision.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

TokenIds = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Pair:
    """One prompt with two responses, as token ids.

    chosen_mask / rejected_mask: bool, one per response token, False where a token is not scored; None scores all.
    """

    prompt_ids: TokenIds
    chosen_ids: TokenIds
    rejected_ids: TokenIds
    chosen_mask: npt.NDArray[np.bool_] | None = None
    rejected_mask: npt.NDArray[np.bool_] | None = None
    weight: float = 1.0
    margin: float = 0.0


def scored_positions(response: TokenIds, mask: npt.NDArray[np.bool_] | None) -> npt.NDArray[np.int64]:
    """Number the scored tokens of a response, from 0; without a mask all are."""
    return np.arange(len(response)) if mask is None else np.flatnonzero(mask)


@dataclass(frozen=True)
class PairBatch:
    """Pairs of one micro-batch and their row numbers in the store."""

    pair_ids: npt.NDArray[np.int64]
    pairs: tuple[Pair, ...]

    def __len__(self) -> int:
        return len(self.pairs)
