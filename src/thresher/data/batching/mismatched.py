"""Labelled examples as KTO reads them: next to each answer, one to a different prompt of the same step."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from thresher.data.batching.plan import PairIds, PairSet, Plan, permuted
from thresher.data.example import ExampleBatch
from thresher.data.store.arrow_schema import hash_example
from thresher.data.store.joined import Stores
from thresher.data.store.reader import HASH_DTYPE, ExampleStore, Hashes, Lengths
from thresher.data.store.split import IndexedLengths

_VERSION = 1  # increase it when the same plan gets different mismatched answers
_STEPS_IN_MEMORY = 4  # those of the policy and of a reference that works ahead


class VisitPlan(Plan):
    """The steps of a plan, whose pairs are numbered in the order of visits, counting repeats."""

    def pair_ids(self, step: int) -> PairIds:
        return np.arange(self.first_visit(step), self.first_visit(step + 1), dtype=np.int64)

    def first_visit(self, step: int) -> int:
        epoch, step_in_epoch = divmod(step, self.steps_per_epoch)
        return epoch * self.num_pairs + step_in_epoch * self.pairs_per_step

    def example_ids(self, step: int) -> PairIds:
        """Return the row numbers of a step's examples in the store, in plan order."""
        return super().pair_ids(step)

    def visited_pairs(self) -> PairSet:
        """Return the distinct row numbers of all steps."""
        return Plan(**vars(self)).visited_pairs()

    def steps_of(self, visits: PairIds) -> PairIds:
        """Return the step of each visit."""
        epochs, in_epoch = np.divmod(visits, self.num_pairs)
        steps: PairIds = epochs * self.steps_per_epoch + in_epoch // self.pairs_per_step
        return steps


@dataclass(frozen=True)
class SetsPlan(VisitPlan):
    """Visits of validation sets, each of which is one step, whatever the others are."""

    sizes: tuple[int, ...] = ()

    def first_visit(self, step: int) -> int:
        return sum(self.sizes[:step])

    @property
    def num_visits(self) -> int:
        return sum(self.sizes)

    def example_ids(self, step: int) -> PairIds:
        size = self.sizes[step]
        return self.first_visit(step) + permuted(np.arange(size, dtype=np.uint64), size, self.seed, 0)

    def steps_of(self, visits: PairIds) -> PairIds:
        return np.searchsorted(np.cumsum(self.sizes), visits, side="right").astype(np.int64)


class MismatchedAnswers:
    """The visits of a plan, numbered in the order of its steps; each is a labelled example with a second response.

    That response is the answer of another example of the step with a different prompt (`rotate`), cut to the length of
    the longest example. A step whose prompts are all equal has none. Steps are computed when they are needed.
    """

    def __init__(self, store: Stores, plan: VisitPlan) -> None:
        self.store, self.plan = store, plan
        self._of_step = lru_cache(_STEPS_IN_MEMORY)(self._compute_step)

    @classmethod
    def of_sets(cls, store: Stores) -> MismatchedAnswers:
        """The examples of validation sets, each of which is one step."""
        sizes = tuple(map(len, store.parts.values()))
        return cls(store, SetsPlan(len(store), seed=0, pairs_per_step=0, num_steps=len(sizes), sizes=sizes))

    def __len__(self) -> int:
        return self.plan.num_visits

    @property
    def parts(self) -> dict[str, ExampleStore]:
        return self.store.parts

    def part_of(self, visits: PairIds) -> PairIds:
        return self.store.part_of(self.examples_of(visits))

    def subset_of(self, visits: PairIds) -> PairIds:
        return self.store.subset_of(self.examples_of(visits))

    def number_in_files(self, visit: int) -> int:
        return self.store.number_in_files(int(self.examples_of(np.array([visit]))[0]))

    @property
    def lengths(self) -> Lengths:
        """Tokens of (prompt, answer, mismatched answer) of each visit."""
        return cast("Lengths", IndexedLengths(len(self), self.lengths_of))

    def examples_of(self, visits: PairIds) -> PairIds:
        """Return the row number in the store of each visit's example."""
        return self._take(visits, 0)

    def others_of(self, visits: PairIds) -> PairIds:
        """Return the row number of the example whose answer stands next to each visit's own; -1 for none."""
        return self._take(visits, 1)

    def lengths_of(self, visits: PairIds) -> Lengths:
        return self._take(visits, 2)

    def _take(self, visits: PairIds, part: int) -> npt.NDArray[Any]:
        if len(visits) == 0:
            return self._of_step(0)[part][:0]
        # of the ends alone: in training, the visits are those of one step
        first, last = self.plan.steps_of(np.array([visits.min(), visits.max()])).tolist()
        if first == last:
            return self._of_step(first)[part].take(visits - self.plan.first_visit(first), axis=0)
        steps = self.plan.steps_of(visits)
        order = np.argsort(steps, kind="stable")
        runs = np.split(order, np.flatnonzero(np.diff(steps[order])) + 1)
        return np.concatenate([self._take(visits[run], part) for run in runs]).take(np.argsort(order), axis=0)

    def _compute_step(self, step: int) -> tuple[PairIds, PairIds, Lengths]:
        ids = self.plan.example_ids(step)
        others, own = rotate(self.store.prompt_hashes(ids)), np.take(self.store.lengths, ids, axis=0)
        if others[0] < 0:
            return ids, others, np.pad(own, ((0, 0), (0, 1)))
        mismatched = np.minimum(own[:, 1].take(others), self.store.longest_example - own[:, 0])
        return ids, ids.take(others), np.column_stack([own, mismatched])

    def read(self, visits: PairIds) -> ExampleBatch:
        visits = np.asarray(visits, dtype=np.int64)
        ids, others = self.examples_of(visits), self.others_of(visits)
        examples = []
        for example, other in zip(self.store.read(ids).pairs, others.tolist(), strict=True):
            responses = example.responses
            if other >= 0:
                room = self.store.longest_example - len(example.prompt_ids)
                answer = self.store[other].responses[0].first_tokens(room)
                responses = (*responses, answer._replace(value=0.0))
            examples.append(replace(example, responses=responses))
        return ExampleBatch(visits, tuple(examples))


class MismatchedAlone:
    """The visits with their mismatched answer alone, or with their own where they have no mismatched one."""

    def __init__(self, visits: MismatchedAnswers) -> None:
        self._visits = visits

    def __len__(self) -> int:
        return len(self._visits)

    @property
    def digest(self) -> str:
        """The digest of what determines all visits and their order; a longer plan has more of them."""
        store, plan = self._visits.store, self._visits.plan
        curriculum = None if plan.curriculum is None else plan.curriculum.order
        sizes = plan.sizes if isinstance(plan, SetsPlan) else ()
        steps = plan.num_pairs, plan.seed, plan.pairs_per_step, plan.shares, plan.order
        content = ("mismatched answers", _VERSION, store.digest, store.longest_example, *steps, curriculum, sizes)
        return hashlib.sha256(repr(content).encode()).hexdigest()

    @property
    def lengths(self) -> Lengths:
        return cast("Lengths", IndexedLengths(len(self), self._lengths_of))

    def _lengths_of(self, visits: PairIds) -> Lengths:
        lengths = self._visits.lengths_of(visits)
        return np.column_stack([lengths[:, 0], np.where(lengths[:, 2] > 0, lengths[:, 2], lengths[:, 1])])

    def read(self, visits: PairIds) -> ExampleBatch:
        batch = self._visits.read(visits)
        return replace(batch, pairs=tuple(replace(each, responses=each.responses[-1:]) for each in batch.pairs))

    def hashes(self) -> Iterator[Hashes]:
        """Yield the content hashes of each step's visits."""
        for step in range(self._visits.plan.num_steps):
            hashes = [hash_example(example).pair for example in self.read(self._visits.plan.pair_ids(step)).pairs]
            yield np.frombuffer(b"".join(hashes), dtype=HASH_DTYPE)


def rotate(prompts: npt.NDArray[np.void]) -> npt.NDArray[np.int64]:
    """Return for each prompt of a step the number of a different one, whose answer it gets; -1 if all are equal.

    Each answer is used once, unless more than half of the prompts are equal. If all differ, it is the one before.
    """
    numbers = np.arange(len(prompts), dtype=np.int64)
    keys = prompts.view("<u8")[::2]  # half of the hash tells prompts apart, and sorts ten times faster
    in_order = np.sort(keys)
    if len(prompts) > 1 and (in_order[1:] != in_order[:-1]).all():
        return np.roll(numbers, 1)
    _, first, group, counts = np.unique(keys, return_index=True, return_inverse=True, return_counts=True)
    if len(counts) == 1:
        return np.full(len(prompts), -1, dtype=np.int64)
    others, most = np.empty_like(numbers), int(counts.max())
    if 2 * most <= len(prompts):
        # equal prompts next to each other: the one before by the most frequent prompt's count is a different one
        order = np.argsort(first[group], kind="stable")
        others[order] = np.roll(order, most)
        return others
    is_most = group == counts.argmax()
    frequent, rest = numbers[is_most], numbers[~is_most]
    others[rest] = frequent[: len(rest)]
    others[frequent] = np.resize(rest, most)
    return others


Examples: TypeAlias = Stores | MismatchedAnswers
