"""Reference scorers: a live model, the base model of an adapter, or the cache."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Protocol, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from thresher.checkpoint.state import load_weights
from thresher.data.batching.batches import Blocks
from thresher.data.batching.mismatched import Examples, MismatchedAlone, MismatchedAnswers
from thresher.data.batching.plan import PairIds, PairSet
from thresher.data.example import Example, ExampleBatch
from thresher.data.store.arrow_schema import hash_example
from thresher.data.store.joined import Stores
from thresher.data.store.reader import ExampleStore, Lengths
from thresher.distributed.groups import SINGLE_PROCESS, DataParallelGroup, Group
from thresher.distributed.tensors import copy_to_device
from thresher.engines.engine import Engine, TrainEngine
from thresher.errors import UserError
from thresher.losses.pairs import ExampleLogps, ResponseLogps, empty_logps, map_tensors
from thresher.reference.cache import NO_LOGPS, FoundLogps, Logps, Origin, ReferenceCache, ShardWriter
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


Found: TypeAlias = Sequence[FoundLogps]  # in the answers, and in the mismatched ones of labelled examples


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
        visited: Callable[[], PairSet] | None,
        *,
        blocks: Blocks,
        device: torch.device,
        num_visits: int,
        group: Group = SINGLE_PROCESS,
        found: FoundLogps | None = None,
    ) -> None:
        """Look up the visited pairs, or all of them.

        Args:
            num_visits: the number of pairs, with repeats, that the scoring time is divided by.
            group: the processes that make this call; rank 0 looks up for all of them.
            found: what a process outside of the group has found.
        """
        self.seconds_per_pair = 0.0
        self.num_scored = 0
        self._cache = cache
        self._source = source
        self._visited = visited
        self._all_blocks = blocks
        self.device = device
        self._num_visits = num_visits
        self._group = group
        self.found: FoundLogps
        self._others_look_up = found is not None
        if found is None:
            self.lookup()
        else:
            self.found = found

    @property
    def found_logps(self) -> Found:
        """What other processes need to read the same logps."""
        return [self.found]

    @property
    def num_missing(self) -> int:
        return self.found.num_missing

    @property
    def num_found(self) -> int:
        return self.found.num_found

    @cached_property
    def _wanted(self) -> PairSet:
        return PairSet(len(self._source)) if self._visited is None else self._visited()

    def iter_score_missing(
        self,
        score: Callable[[ExampleBatch], ExampleLogps],
        *,
        dp_group: DataParallelGroup = DataParallelGroup(),  # noqa: B008  # frozen
    ) -> Iterator[tuple[int, int]]:
        """Score this rank's missing blocks; yield (blocks done, blocks of this rank). One alone looks up again."""
        started = time.perf_counter()
        num_blocks = sum(1 for _ in self._missing_blocks(dp_group))
        num_dummy_batches = dp_group.max_over_ranks(num_blocks) - num_blocks
        if num_blocks:
            with self._cache.writer() if dp_group.is_writer else nullcontext() as writer:
                for done, block in enumerate(self._missing_blocks(dp_group), start=1):
                    self._score_block(block, score, writer)
                    yield done, num_blocks
            if writer is not None:
                self._cache.mark_verified(writer.written)
        for _ in range(num_dummy_batches):  # for lockstep
            score(self._source.read(np.zeros(0, dtype=np.int64)))
        if num_blocks and self._group.size == 1 and not self._others_look_up:
            self.lookup()
        self.seconds_per_pair = (time.perf_counter() - started) / max(1, self._num_visits)

    def lookup(self) -> None:
        """Search the cache again: other processes may have scored some of the pairs."""
        is_leader = self._group.rank == 0 or self._group.group is None
        found = self._cache.find(_parts_of(self._source), self._wanted) if is_leader else None
        self.found = cast("FoundLogps", self._group.broadcast_object(found))

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
        return _by_side(self.find(batch.pair_ids, batch.pairs), batch.num_sides, self.device)

    def find(self, pair_ids: PairIds, examples: Sequence[Example]) -> list[list[Logps]]:
        """Read the logps of each response of some pairs; raise if other tokens were scored."""
        logps = []
        for pair_id, example, (key, sides) in zip(pair_ids, examples, self.found.read(pair_ids), strict=True):
            if hash_example(example).pair != key:
                raise UserError(
                    f"the tokens of pair {pair_id} are not those that the reference has scored; check the data with "
                    f"`thresher inspect STORE --verify`, then remove {self._cache.directory} to score them again"
                )
            logps.append(sides)
        return logps

    def _missing_blocks(self, dp_group: DataParallelGroup) -> Iterator[PairIds]:
        """Yield the pairs of this rank's blocks that have missing ones."""
        num_wanted = sum(len(starts) for starts, *_ in self._wanted_blocks())
        # neighbours to the same rank, so that a shard lists few ranges; enough of them for an even division
        together = max(1, min(_MAX_BLOCKS_TOGETHER, num_wanted // (_MIN_RUNS * dp_group.size)))
        before = 0
        for starts, stops, is_missing in self._wanted_blocks():
            # assigned before cached blocks are excluded: processes may have looked up at different times
            ranks = (np.arange(before, before + len(starts)) // together) % dp_group.size
            for block in np.flatnonzero(is_missing & (ranks == dp_group.rank)).tolist():
                yield np.arange(starts[block], stops[block])
            before += len(starts)

    def _wanted_blocks(self) -> Iterator[tuple[PairIds, PairIds, npt.NDArray[np.bool_]]]:
        """Yield blocks with visited pairs, some at a time: their first pairs, their ends, whether one is missing."""
        if not self.num_missing:
            return
        for edges in self._all_blocks.chunks():
            start, stop = int(edges[0]), int(edges[-1])
            is_wanted = self._wanted.mask(start, stop)
            is_missing = is_wanted & self.found.is_missing(start, stop)
            wanted, missing = (np.logical_or.reduceat(each, edges[:-1] - start) for each in (is_wanted, is_missing))
            yield edges[:-1][wanted], edges[1:][wanted], missing[wanted]

    def _score_block(
        self, ids: PairIds, score: Callable[[ExampleBatch], ExampleLogps], writer: ShardWriter | None
    ) -> None:
        batch = self._source.read(ids)
        scored = score(batch)
        self.num_scored += len(batch)
        if writer is None:
            return
        by_side = [_split(side) for side in scored.sides]
        is_missing = self.found.is_missing(int(ids[0]), int(ids[-1]) + 1)
        origins = self._origins(ids)
        for index in np.flatnonzero(is_missing).tolist():
            # the hash of the scored tokens, not the one in the store
            writer.add(hash_example(batch.pairs[index]).pair, [side[index] for side in by_side], origins[index])
        writer.end_block()

    def _origins(self, ids: PairIds) -> list[Origin]:
        """Return the part of each pair, and its row there."""
        digests, starts = self._parts
        parts = np.searchsorted(starts, ids, side="right") - 1
        rows = ids - starts[parts]
        return [Origin(digests[part], row) for part, row in zip(parts.tolist(), rows.tolist(), strict=True)]

    @cached_property
    def _parts(self) -> tuple[list[str], PairIds]:
        parts = _parts_of(self._source)
        return [part.digest for part in parts], np.cumsum([0, *map(len, parts)])


# a shard has about this many blocks
_MAX_BLOCKS_TOGETHER, _MIN_RUNS = 1024, 64


def _parts_of(source: Stores | MismatchedAlone) -> Sequence[ExampleStore | MismatchedAlone]:
    return [source] if isinstance(source, MismatchedAlone) else list(source.parts.values())


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
    def found_logps(self) -> Found:
        return [self.own.found, self.mismatched.found]

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
        answers = [replace(each, responses=each.responses[:1]) for each in batch.pairs]
        others = [replace(each, responses=each.responses[-1:]) for each in batch.pairs]
        own = self.own.find(self.visits.examples_of(batch.pair_ids), answers)
        mismatched = self.mismatched.find(batch.pair_ids, others)
        found = [
            [*answer, *(other if len(example.responses) > 1 else [])]
            for example, answer, other in zip(batch.pairs, own, mismatched, strict=True)
        ]
        return _by_side(found, batch.num_sides, self.own.device)


Precomputed: TypeAlias = PrecomputedReference | MismatchedReference


def precomputed(
    cache: ReferenceCache,
    examples: Examples,
    visited: Callable[[], PairSet] | None,
    *,
    blocks_of: Callable[[Lengths], Blocks],
    device: torch.device,
    num_visits: int,
    group: Group = SINGLE_PROCESS,
    found: Found | None = None,
) -> Precomputed:
    """Look up the visited examples, or all of them, with the mismatched answers of all visits.

    Args:
        group: the processes that make this call; rank 0 looks up for all of them.
        found: what a process outside of the group has found.
    """
    known = iter(found or ())

    def find(source: Stores | MismatchedAlone, visited: Callable[[], PairSet] | None) -> PrecomputedReference:
        # the blocks of a source do not depend on what it is mixed with, and so neither do the bits of its logps
        blocks = Blocks.concatenated([blocks_of(part.lengths) for part in _parts_of(source)])
        return PrecomputedReference(
            cache,
            source,
            visited,
            blocks=blocks,
            device=device,
            num_visits=num_visits,
            group=group,
            found=next(known, None),
        )

    if isinstance(examples, MismatchedAnswers):
        return MismatchedReference(find(examples.store, visited), find(MismatchedAlone(examples), None), examples)
    return find(examples, visited)


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
