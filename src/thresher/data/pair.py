"""Tokenized pairs and micro-batches of them, unpadded; layouts collate them into model inputs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

TokenIds = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Pair:
    """Token ids of one prompt and two responses."""

    prompt_ids: TokenIds
    chosen_ids: TokenIds
    rejected_ids: TokenIds
    #: one bool per response token, False where it is not scored; None scores all tokens
    chosen_mask: npt.NDArray[np.bool_] | None = None
    rejected_mask: npt.NDArray[np.bool_] | None = None
    weight: float = 1.0
    margin: float = 0.0


def scored_positions(
    prompt: TokenIds, response: TokenIds, mask: npt.NDArray[np.bool_] | None, *, with_prompt: bool = False
) -> npt.NDArray[np.int64]:
    """Return the positions of the scored tokens in prompt + response, from 0.

    `with_prompt` scores all tokens but the first, which nothing predicts, whatever the mask.
    """
    if with_prompt:
        return np.arange(1, len(prompt) + len(response))
    return len(prompt) + (np.arange(len(response)) if mask is None else np.flatnonzero(mask))


@dataclass(frozen=True)
class PairBatch:
    """The pairs of one micro-batch and their row numbers in the store."""

    pair_ids: npt.NDArray[np.int64]
    pairs: tuple[Pair, ...]

    def __len__(self) -> int:
        return len(self.pairs)
