"""Reference scorers: a live model, the base model of an adapter, or the cache."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from thresher.checkpoint.state import load_weights
from thresher.data.batching.batches import Blocks
from thresher.data.batching.mismatched import Examples, MismatchedAlone, MismatchedAnswers
from thresher.data.batching.plan import PairIds
from thresher.data.example import ExampleBatch
from thresher.data.store.arrow_schema import hash_example
from thresher.data.store.joined import Stores
from thresher.data.store.reader import HASH_DTYPE, Lengths
from thresher.distributed.groups import DataParallelGroup
from thresher.distributed.tensors import copy_to_device
from thresher.engines.engine import Engine, TrainEngine
from thresher.errors import UserError
from thresher.losses.pairs import ExampleLogps, ResponseLogps, empty_logps, map_tensors
from thresher.reference.cache import NO_LOGPS, FoundLogps, Logps, ReferenceCache, ShardWriter
from thresher.reference.step_zero_check import Forwards


class ReferenceScorer(Protocol):
    """Returns the reference logps of a micro-batch; seconds_per_pair is the time spent on precomputing them."""

    @property
    def seconds_per_pair(self) -> float: ...

    def logps(self, batch: ExampleBatch) -> ExampleLogps: ...


@dataclass(frozen=True)
class LiveReference:
    """Score on demand, with a frozen model or with the policy's adapter disabled."""

    score: Callable[[ExampleBatch], ExampleLogps]
    device: torch.device
    seconds_per_pair: float = 0.0

    def logps(self, batch: ExampleBatch) -> ExampleLogps:
        scored = self.score(batch)
        return map_tensors(scored, lambda tensor: copy_to_device(tensor, self.device))


class PrecomputedReference:
    """Logps of a run's pairs, read from the cache; missing ones are scored in blocks of neighbouring pairs.

    The bits of a logp depend on the other pairs in the batch. A block is always scored in full and in order, so they
    depend neither on which pairs a run visits nor on where an earlier run was killed. num_scored counts the pairs that
    went through the model.
    """

    def __init__(
        self,
        cache: ReferenceCache,
        source: Stores | MismatchedAlone,
        pair_ids: PairIds,
        *,
        blocks: Blocks,
        device: torch.device,
        num_visits: int,
    ) -> None:
        """Look up `pair_ids`; num_visits is the number of pairs, with repeats, that the scoring time is divided by."""
        self.seconds_per_pair = 0.0
        self.num_scored = 0
        self._cache = cache
        self._source = source
        self._all_blocks = blocks
        self.device = device
        self._num_visits = num_visits
        self._blocks: PairIds = np.unique(blocks.containing(pair_ids))
        sizes = blocks.sizes(self._blocks)
        self._starts = np.cumsum(sizes) - sizes  # position of each block's first pair among those looked up
        self._is_wanted = np.zeros(int(sizes.sum()), dtype=np.bool_)
        self._is_wanted[self._positions(pair_ids)] = True
        self._found: FoundLogps
        self.lookup()

    @property
    def num_missing(self) -> int:
        return int((self._is_wanted & self._found.is_missing()).sum())

    @property
    def num_found(self) -> int:
        return int(self._is_wanted.sum()) - self.num_missing

    def iter_score_missing(
        self,
        score: Callable[[ExampleBatch], ExampleLogps],
        *,
        dp_group: DataParallelGroup = DataParallelGroup(),  # noqa: B008  # frozen
    ) -> Iterator[tuple[int, int]]:
        """Score this rank's missing blocks, then look all pairs up again; yield (blocks done, blocks of this rank)."""
        started = time.perf_counter()
        blocks = self._missing_blocks(dp_group)
        num_dummy_batches = dp_group.max_over_ranks(len(blocks)) - len(blocks)
        if blocks:
            with self._cache.writer() if dp_group.is_writer else nullcontext() as writer:
                for done, block in enumerate(blocks, start=1):
                    self._score_block(block, score, writer)
                    yield done, len(blocks)
            if writer is not None:
                self._cache.mark_verified(writer.written)
        for _ in range(num_dummy_batches):  # for lockstep
            score(self._source.read(np.zeros(0, dtype=np.int64)))
        if blocks:
            self.lookup()
        self.seconds_per_pair = (time.perf_counter() - started) / max(1, self._num_visits)

    def lookup(self) -> None:
        """Search the cache again: other processes may have scored some of the pairs."""
        ids = self._all_blocks.pairs(self._blocks)
        keys = np.empty(len(ids), dtype=HASH_DTYPE)
        start = 0
        for hashes in self._source.hashes():
            first, last = np.searchsorted(ids, (start, start + len(hashes)))
            keys[first:last] = hashes[ids[first:last] - start]
            start += len(hashes)
        self._found = self._cache.find(keys)

    def begin(self, seconds_per_pair: float) -> None:
        """Find what other processes have scored; raise if pairs are missing still."""
        if self.num_missing:
            self.lookup()
        if self.num_missing:
            raise UserError(
                f"reference workers scored {self.num_missing} pairs that a policy worker cannot find in "
                f"{self._cache.directory.parent}; set reference.cache_dir to a directory that all nodes share"
            )
        self.seconds_per_pair = seconds_per_pair

    def logps(self, batch: ExampleBatch) -> ExampleLogps:
        """Read the logps of a micro-batch."""
        if not len(batch):
            return empty_logps(self.device)
        return _by_side(self.find(batch.pair_ids), batch.num_sides, self.device)

    def find(self, pair_ids: PairIds) -> list[list[Logps]]:
        """Read the logps of each response of some pairs."""
        return [self._found.logps(position) for position in self._positions(pair_ids).tolist()]

    def _missing_blocks(self, dp_group: DataParallelGroup) -> list[int]:
        is_missing = self._is_wanted & self._found.is_missing()
        of_blocks = np.logical_or.reduceat(is_missing, self._starts) if len(self._starts) else is_missing
        # assigned before cached blocks are excluded: other ranks write meanwhile, and all must assign the same way
        of_blocks = dp_group.world.broadcast_object(of_blocks)
        is_local = np.arange(len(self._blocks)) % dp_group.size == dp_group.rank
        return [int(block) for block in self._blocks[is_local & of_blocks]]

    def _score_block(
        self, block: int, score: Callable[[ExampleBatch], ExampleLogps], writer: ShardWriter | None
    ) -> None:
        ids = self._all_blocks.pairs(np.array([block]))
        batch = self._source.read(ids)
        scored = score(batch)
        self.num_scored += len(batch)
        if writer is None:
            return
        by_side = [_split(side) for side in scored.sides]
        is_missing = self._found.is_missing(self._positions(ids))
        for index in np.flatnonzero(is_missing).tolist():
            # the hash of the scored tokens, not the one in the store
            writer.add(hash_example(batch.pairs[index]).pair, [side[index] for side in by_side])
        writer.end_block()

    def _positions(self, pair_ids: PairIds) -> PairIds:
        """Positions of pairs among the pairs of the blocks that were looked up."""
        blocks = self._all_blocks.containing(pair_ids)
        at = np.searchsorted(self._blocks, blocks)
        is_known = np.take(self._blocks, at, mode="clip") == blocks
        if not is_known.all():
            raise IndexError(f"pair {pair_ids[~is_known][0]} was not looked up in the cache")
        return self._starts[at] + pair_ids - self._all_blocks.edges[blocks]


def _split(side: ResponseLogps) -> list[Logps]:
    values = side.values.to("cpu", torch.float32).numpy()
    return np.split(values, np.cumsum(side.lengths.cpu().numpy())[:-1])


def _concatenate(responses: Sequence[Logps], device: torch.device) -> ResponseLogps:
    lengths = torch.tensor([len(response) for response in responses], dtype=torch.int64)
    values = torch.from_numpy(np.concatenate(responses))
    return ResponseLogps(copy_to_device(values, device), copy_to_device(lengths, device))


@dataclass(frozen=True)
class MismatchedReference:
    """Logps of answers, which are scored once for all epochs and runs, and of each visit's mismatched answer."""

    own: PrecomputedReference
    mismatched: PrecomputedReference
    visits: MismatchedAnswers

    @property
    def seconds_per_pair(self) -> float:
        return self.own.seconds_per_pair + self.mismatched.seconds_per_pair

    @property
    def num_scored(self) -> int:
        return self.own.num_scored + self.mismatched.num_scored

    @property
    def num_missing(self) -> int:
        return self.own.num_missing + self.mismatched.num_missing

    @property
    def num_found(self) -> int:
        return self.own.num_found + self.mismatched.num_found

    def iter_score_missing(
        self,
        score: Callable[[ExampleBatch], ExampleLogps],
        *,
        dp_group: DataParallelGroup = DataParallelGroup(),  # noqa: B008  # frozen
    ) -> Iterator[tuple[int, int]]:
        """Score the missing blocks of both; yield (blocks done, blocks of this rank) of each."""
        yield from self.own.iter_score_missing(score, dp_group=dp_group)
        yield from self.mismatched.iter_score_missing(score, dp_group=dp_group)

    def begin(self, seconds_per_pair: float) -> None:
        self.own.begin(seconds_per_pair)
        self.mismatched.begin(0.0)

    def logps(self, batch: ExampleBatch) -> ExampleLogps:
        if not len(batch):
            return empty_logps(self.own.device)
        own, mismatched = self.own.find(self.visits.examples_of(batch.pair_ids)), self.mismatched.find(batch.pair_ids)
        found = [
            [*answer, *(other if len(example.responses) > 1 else [])]
            for example, answer, other in zip(batch.pairs, own, mismatched, strict=True)
        ]
        return _by_side(found, batch.num_sides, self.own.device)


Precomputed: TypeAlias = PrecomputedReference | MismatchedReference


def precomputed(
    cache: ReferenceCache,
    examples: Examples,
    pair_ids: PairIds | None,
    *,
    blocks_of: Callable[[Lengths], Blocks],
    device: torch.device,
    num_visits: int,
) -> Precomputed:
    """Look up examples by their row numbers, or all of them, with the mismatched answers of all visits."""

    def find(source: Stores | MismatchedAlone, ids: PairIds | None) -> PrecomputedReference:
        ids = np.arange(len(source), dtype=np.int64) if ids is None else ids
        # the blocks of a source do not depend on what it is mixed with, and so neither do the bits of its logps
        parts = [source] if isinstance(source, MismatchedAlone) else source.parts.values()
        blocks = Blocks.concatenated([blocks_of(part.lengths) for part in parts])
        return PrecomputedReference(cache, source, ids, blocks=blocks, device=device, num_visits=num_visits)

    if isinstance(examples, MismatchedAnswers):
        return MismatchedReference(find(examples.store, pair_ids), find(MismatchedAlone(examples), None), examples)
    return find(examples, pair_ids)


def _by_side(found: Sequence[Sequence[Logps]], num_sides: int, device: torch.device) -> ExampleLogps:
    sides = list(itertools.zip_longest(*found, fillvalue=NO_LOGPS))[:num_sides]
    return ExampleLogps(tuple(_concatenate(side, device) for side in sides))


STEM = "reference"


@dataclass(frozen=True)
class SyncedReference:
    """Move the reference towards the policy by `alpha` every `every_steps` steps."""

    reference: Engine
    policy: TrainEngine
    every_steps: int
    alpha: float

    def after_step(self, step: int) -> None:
        if step % self.every_steps == 0:
            self.reference.ema_update(self.policy.weights(), self.alpha)

    def tensors(self) -> Mapping[str, Mapping[str, Tensor]]:
        return {STEM: self.reference.weights()}

    def load(self, directory: Path) -> None:
        weights = self.reference.weights()
        other_rank_names = self.policy.dp_group.world.names_on_other_ranks(weights)
        hint = "resume with the same reference settings"
        load_weights(directory, weights, stem=STEM, hint=hint, other_rank_names=other_rank_names)


@dataclass(frozen=True)
class Reference:
    """The reference as a rank uses it: the scorers of both datasets, None for a loss without a reference."""

    train: ReferenceScorer | None = None
    validation: ReferenceScorer | None = None
    equals_policy: bool = False  # at step 0, up to the rounding of different forwards
    forwards: Forwards = "other mesh"
    synced: SyncedReference | None = None

    @property
    def cached(self) -> list[Precomputed]:
        """The scorers that read the cache; none outside of mode precompute."""
        return [each for each in (self.train, self.validation) if isinstance(each, Precomputed)]

    @property
    def num_found(self) -> int:
        """Pairs of the run that the cache has."""
        return sum(each.num_found for each in self.cached)

    @property
    def num_missing(self) -> int:
        """Pairs of the run that the cache lacks."""
        return sum(each.num_missing for each in self.cached)

    def begin(self, seconds_per_pair: float | None) -> None:
        """Read the filled cache; seconds_per_pair is what filling it has cost, None if that was not needed."""
        if seconds_per_pair is not None:
            for each in self.cached:
                each.begin(seconds_per_pair)
