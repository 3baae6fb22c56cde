"""Who says what the reference thinks of a pair: a live model, the adapter's base, or the cache."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from thresher.data.batching.plan import PairIds
from thresher.data.pair import PairBatch
from thresher.data.store.arrow_schema import hash_pair
from thresher.data.store.reader import HASH_DTYPE, Hashes
from thresher.distributed.groups import DataParallelGroup
from thresher.losses.pairs import ChosenRejectedLogps, ResponseLogps, empty_logps
from thresher.reference.cache import FoundLogps, ReferenceCache
from thresher.reference.shards import Logps, ShardLimits, ShardWriter


@dataclass(frozen=True)
class LiveReference:
    """Score at the moment of need: a frozen model, or the policy with its adapter off."""

    score: Callable[[PairBatch], ChosenRejectedLogps]
    device: torch.device
    seconds_per_pair: float = 0.0

    def logps(self, batch: PairBatch) -> ChosenRejectedLogps:
        scored = self.score(batch)
        chosen, rejected = (
            ResponseLogps(side.values.to(self.device), side.lengths.to(self.device))
            for side in (scored.chosen, scored.rejected)
        )
        return ChosenRejectedLogps(chosen, rejected)


class PairSource(Protocol):
    """What is needed of a store; hashes are over token ids and loss masks, in the order of the pairs."""

    def __len__(self) -> int: ...

    def read(self, pair_ids: PairIds) -> PairBatch: ...

    def hashes(self) -> Iterator[Hashes]: ...


class PrecomputedReference:
    """Logps of a run's pairs, read from the cache; what it lacks is scored in blocks of neighbouring pairs.

    The bits of a forward depend on who shares its batch. A block is always scored whole and in order, so they depend
    neither on which pairs a run visits nor on where an earlier one was killed. num_scored counts the pairs that went
    through the model.
    """

    def __init__(
        self,
        cache: ReferenceCache,
        source: PairSource,
        pair_ids: PairIds,
        *,
        pairs_per_block: int,
        device: torch.device,
        num_visits: int,
    ) -> None:
        """Look up `pair_ids`; `num_visits` spreads what scoring costs over the pairs of the run, repeats counted."""
        self.seconds_per_pair = 0.0
        self.num_scored = 0
        self._cache = cache
        self._source = source
        self._pairs_per_block = pairs_per_block
        self._device = device
        self._num_visits = num_visits
        self._blocks: PairIds = np.unique(pair_ids // pairs_per_block)
        self._is_wanted = np.zeros(len(_ids_of(self._blocks, pairs_per_block, len(source))), dtype=np.bool_)
        self._is_wanted[self._positions(pair_ids)] = True
        self._found: FoundLogps
        self.lookup()

    @property
    def num_pairs(self) -> int:
        return int(self._is_wanted.sum())

    @property
    def num_missing(self) -> int:
        return int((self._is_wanted & self._found.is_missing()).sum())

    def score_missing(
        self,
        score: Callable[[PairBatch], ChosenRejectedLogps],
        *,
        limits: ShardLimits = ShardLimits(),  # noqa: B008  # frozen
        advance: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        """Score every block that lacks a wanted pair, and look all pairs up again."""
        for done, total in self.iter_score_missing(score, limits=limits):
            advance(done, total)

    def iter_score_missing(
        self,
        score: Callable[[PairBatch], ChosenRejectedLogps],
        *,
        ranks: DataParallelGroup = DataParallelGroup(),  # noqa: B008  # frozen
        limits: ShardLimits = ShardLimits(),  # noqa: B008  # frozen
    ) -> Iterator[tuple[int, int]]:
        """Do the work of `score_missing` for this rank's share, yielding (blocks done, blocks of this rank)."""
        started = time.perf_counter()
        blocks = self._missing_blocks(ranks)
        num_missing_of_others = ranks.max_over_ranks(len(blocks)) - len(blocks)
        if blocks:
            with self._cache.writer(limits) if ranks.is_writer else nullcontext() as writer:
                for done, block in enumerate(blocks, start=1):
                    self._score_block(block, score, writer)
                    yield done, len(blocks)
            if writer is not None:
                self._cache.mark_verified(writer.written)
        for _ in range(num_missing_of_others):  # to keep step
            score(self._source.read(np.zeros(0, dtype=np.int64)))
        if blocks:
            self.lookup()
        self.seconds_per_pair = (time.perf_counter() - started) / max(1, self._num_visits)

    def lookup(self) -> None:
        """Find the pairs in the cache as it is now: others may have scored some of them."""
        ids = _ids_of(self._blocks, self._pairs_per_block, len(self._source))
        keys = np.empty(len(ids), dtype=HASH_DTYPE)
        start = 0
        for hashes in self._source.hashes():
            first, last = np.searchsorted(ids, (start, start + len(hashes)))
            keys[first:last] = hashes[ids[first:last] - start]
            start += len(hashes)
        self._found = self._cache.find(keys)

    def logps(self, batch: PairBatch) -> ChosenRejectedLogps:
        """Read the logps of a micro-batch."""
        if not len(batch):
            return empty_logps(self._device)
        pairs = [self._found.logps(position) for position in self._positions(batch.pair_ids).tolist()]
        chosen, rejected = (_joined([pair[side] for pair in pairs], self._device) for side in (0, 1))
        return ChosenRejectedLogps(chosen, rejected)

    def _missing_blocks(self, ranks: DataParallelGroup) -> list[int]:
        # dealt out before what is there is left out: other ranks write meanwhile, and all must deal alike
        is_missing = ranks.world.broadcast_object(self._blocks_with(self._is_wanted & self._found.is_missing()))
        is_mine = np.arange(len(self._blocks)) % ranks.size == ranks.rank
        return [int(block) for block in self._blocks[is_mine & is_missing]]

    def _blocks_with(self, is_marked: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """Mark the blocks that hold a marked pair."""
        starts = np.arange(len(self._blocks)) * self._pairs_per_block
        return np.logical_or.reduceat(is_marked, starts) if len(starts) else is_marked

    def _score_block(
        self, block: int, score: Callable[[PairBatch], ChosenRejectedLogps], writer: ShardWriter | None
    ) -> None:
        ids = _ids_of(np.array([block]), self._pairs_per_block, len(self._source))
        batch = self._source.read(ids)
        sides = score(batch)
        self.num_scored += len(batch)
        if writer is None:
            return
        chosen, rejected = (_split(side) for side in (sides.chosen, sides.rejected))
        is_missing = self._found.is_missing(self._positions(ids))
        for index in np.flatnonzero(is_missing).tolist():
            # the hash of what was scored, not what the store remembers of it
            writer.add(hash_pair(batch.pairs[index]).pair, chosen[index], rejected[index])
        writer.end_block()

    def _positions(self, pair_ids: PairIds) -> PairIds:
        """Where pairs stand among those of the blocks: only the very last block of a source can be short."""
        blocks, rows = np.divmod(pair_ids, self._pairs_per_block)
        at = np.searchsorted(self._blocks, blocks)
        is_known = np.take(self._blocks, at, mode="clip") == blocks
        if not is_known.all():
            raise IndexError(f"pair {pair_ids[~is_known][0]} is none of the pairs that were looked up in the cache")
        return at * self._pairs_per_block + rows


def _ids_of(blocks: PairIds, pairs_per_block: int, num_pairs: int) -> PairIds:
    """Number the pairs of some blocks, in order."""
    ids = (blocks[:, None] * pairs_per_block + np.arange(pairs_per_block)).reshape(-1)
    return ids[ids < num_pairs]


def _split(side: ResponseLogps) -> list[Logps]:
    values = side.values.to("cpu", torch.float32).numpy()
    return np.split(values, np.cumsum(side.lengths.cpu().numpy())[:-1])


def _joined(parts: list[Logps], device: torch.device) -> ResponseLogps:
    values = torch.from_numpy(np.concatenate(parts))
    lengths = torch.tensor([len(part) for part in parts], dtype=torch.int64)
    return ResponseLogps(values.to(device), lengths.to(device))
