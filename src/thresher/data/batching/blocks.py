"""Blocks of neighbouring pairs that are scored together, by a token budget, a number of pairs, or both.

For scoring without a gradient: evaluation, and a reference that is computed in advance.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from thresher.data.batching.balance import CostModel
from thresher.data.batching.plan import PairIds
from thresher.data.store.reader import Lengths


@dataclass(frozen=True)
class Blocks:
    """Consecutive blocks that cover a store; block i contains the pairs from edges[i] up to edges[i + 1]."""

    edges: PairIds

    @classmethod
    def by_pairs(cls, num_pairs: int, pairs_per_block: int) -> Blocks:
        return cls(np.append(np.arange(0, num_pairs, pairs_per_block, dtype=np.int64), num_pairs))

    @classmethod
    def by_tokens(cls, tokens: npt.NDArray[np.int64], budget: int) -> Blocks:
        """Make blocks of nearly equal numbers of tokens, about the budget each; `tokens` has one entry per pair.

        Equal, because small matrix products round differently in bf16: a short last block would be noisier.
        """
        ends = np.cumsum(tokens)
        total = int(ends[-1]) if len(ends) else 0
        num_blocks = max(1, -(-total // budget))
        cuts = np.searchsorted(ends, np.arange(1, num_blocks) * (total / num_blocks)) + 1
        return cls(np.unique(np.concatenate([[0], cuts, [len(tokens)]]).astype(np.int64)))

    def containing(self, pair_ids: PairIds) -> PairIds:
        """Return the block of each pair."""
        return np.searchsorted(self.edges, pair_ids, side="right").astype(np.int64) - 1

    def sizes(self, blocks: PairIds) -> PairIds:
        return self.edges[blocks + 1] - self.edges[blocks]

    def pairs(self, blocks: PairIds) -> PairIds:
        """Return the pairs of some blocks, in order."""
        sizes = self.sizes(blocks)
        first_positions = np.cumsum(sizes) - sizes
        return np.repeat(self.edges[blocks] - first_positions, sizes) + np.arange(int(sizes.sum()))

    def halved(self, is_too_large: npt.NDArray[np.bool_]) -> Blocks:
        """Cut some blocks of several pairs in half."""
        starts, sizes = self.edges[:-1][is_too_large], np.diff(self.edges)[is_too_large]
        return Blocks(np.sort(np.append(self.edges, starts + sizes // 2)))


@dataclass(frozen=True)
class ScoringBatching:
    """How pairs that are only scored are batched; a pure function of their lengths.

    max_tokens: token budget of a batch, with padding; a longer pair gets a batch to itself. max_pairs: None for as many
    as the budget allows. costs: counts the tokens of pairs in packed rows; None if rows are padded.
    """

    max_tokens: int
    max_pairs: int | None = None
    costs: CostModel | None = None

    def blocks(self, lengths: Lengths) -> Blocks:
        """Cut pairs into blocks; lengths [pairs, (prompt, chosen, rejected)]."""
        if self.max_pairs is None and self.costs is not None:
            return Blocks.by_tokens(self.costs.tokens(lengths), self.max_tokens)
        blocks = Blocks.by_pairs(len(lengths), self.max_pairs or max(1, len(lengths)))
        while (is_too_large := self._is_too_large(blocks, lengths)).any():
            blocks = blocks.halved(is_too_large)
        return blocks

    def _is_too_large(self, blocks: Blocks, lengths: Lengths) -> npt.NDArray[np.bool_]:
        starts, sizes = blocks.edges[:-1], np.diff(blocks.edges)
        if not len(starts):
            return np.zeros(0, dtype=np.bool_)
        if self.costs is not None:
            tokens = np.add.reduceat(self.costs.tokens(lengths), starts)
        else:
            widths = lengths[:, 0].astype(np.int64) + lengths[:, 1:].max(axis=1)
            tokens = 2 * sizes * np.maximum.reduceat(widths, starts)  # two rows per pair
        is_too_large: npt.NDArray[np.bool_] = (tokens > self.max_tokens) & (sizes > 1)
        return is_too_large
