"""Tokenized pairs and micro-batches of them, unpadded; layouts collate them into model inputs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

TokenIds = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Pair:
    """Token ids of one prompt and two responses.

    chosen_mask, rejected_mask: one bool per response token, False where it is not scored; None scores all tokens.
    """

    prompt_ids: TokenIds
    chosen_ids: TokenIds
    rejected_ids: TokenIds
    chosen_mask: npt.NDArray[np.bool_] | None = None
    rejected_mask: npt.NDArray[np.bool_] | None = None
    weight: float = 1.0
    margin: float = 0.0


def scored_positions(response: TokenIds, mask: npt.NDArray[np.bool_] | None) -> npt.NDArray[np.int64]:
    """Return the positions of the scored tokens of a response, from 0."""
    return np.arange(len(response)) if mask is None else np.flatnonzero(mask)


@dataclass(frozen=True)
class PairBatch:
    """The pairs of one micro-batch and their row numbers in the store."""

    pair_ids: npt.NDArray[np.int64]
    pairs: tuple[Pair, ...]

    def __len__(self) -> int:
        return len(self.pairs)
