"""Labelled examples as KTO reads them: next to each answer, one to a different prompt of the same step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from thresher.data.batching.plan import PairIds, Plan
from thresher.data.example import ExampleBatch, Response
from thresher.data.store.arrow_schema import hash_pair
from thresher.data.store.reader import HASH_DTYPE, ExampleStore, Hashes, Lengths

_STEPS_IN_MEMORY = 4  # those of the policy and of a reference that works ahead


class VisitPlan(Plan):
    """The steps of a plan, whose pairs are numbered in the order of visits, counting repeats."""

    def pair_ids(self, step: int) -> PairIds:
        epoch, step_in_epoch = divmod(step, self.steps_per_epoch)
        start = step_in_epoch * self.pairs_per_step
        stop = min(start + self.pairs_per_step, self.num_pairs)
        return epoch * self.num_pairs + np.arange(start, stop, dtype=np.int64)

    def example_ids(self, step: int) -> PairIds:
        """Return the row numbers of a step's examples in the store, in plan order."""
        return super().pair_ids(step)

    def visited_pairs(self) -> PairIds:
        """Return the distinct row numbers of all steps, in ascending order."""
        return Plan(**vars(self)).visited_pairs()

    def steps_of(self, visits: PairIds) -> tuple[PairIds, PairIds]:
        """Return the step of each visit, and its position in the step."""
        epochs, in_epoch = np.divmod(visits, self.num_pairs)
        steps, positions = np.divmod(in_epoch, self.pairs_per_step)
        return epochs * self.steps_per_epoch + steps, positions


class MismatchedAnswers:
    """The visits of a plan, numbered in the order of its steps; each is a labelled example with a second response.

    That response is the answer of another example of the step with a different prompt (`rotate`), cut to the length of
    the longest example. A step whose prompts are all equal has none. Steps are computed when they are needed.
    """

    def __init__(self, store: ExampleStore, plan: VisitPlan) -> None:
        self.store, self.plan = store, plan
        self._of_step = lru_cache(_STEPS_IN_MEMORY)(self._compute_step)

    @classmethod
    def in_one_step(cls, store: ExampleStore) -> MismatchedAnswers:
        """The examples of a validation set, as one step."""
        return cls(store, VisitPlan(len(store), seed=0, pairs_per_step=len(store), num_steps=1))

    def __len__(self) -> int:
        return self.plan.num_visits

    def number_in_files(self, visit: int) -> int:
        return self.store.number_in_files(int(self.examples_of(np.array([visit]))[0]))

    @property
    def lengths(self) -> Lengths:
        """Tokens of (prompt, answer, mismatched answer) of each visit."""
        return cast("Lengths", _VisitLengths(self))

    def examples_of(self, visits: PairIds) -> PairIds:
        """Return the row number in the store of each visit's example."""
        return self.gather(visits)[0]

    def gather(self, visits: PairIds) -> tuple[npt.NDArray[Any], ...]:
        """Return of each visit the example, the one whose answer stands next to its own (-1: none), and the lengths."""
        steps, positions = self.plan.steps_of(visits)
        if len(steps) == 0 or steps.min() == steps.max():
            of_step = self._of_step(int(steps[0]) if len(steps) else 0)
            return tuple(each.take(positions, axis=0) for each in of_step)
        order = np.argsort(steps, kind="stable")
        runs = np.split(order, np.flatnonzero(np.diff(steps[order])) + 1)
        parts = [self.gather(visits[run]) for run in runs]
        back = np.argsort(order)
        return tuple(np.concatenate(each).take(back, axis=0) for each in zip(*parts, strict=True))

    def _compute_step(self, step: int) -> tuple[PairIds, PairIds, Lengths]:
        ids = self.plan.example_ids(step)
        others = rotate(ids, self.store.prompt_hashes(ids))
        own = np.take(self.store.lengths, ids, axis=0)
        room = self.store.longest_pair - own[:, 0].astype(np.int64)
        mismatched = np.where(others < 0, 0, np.minimum(np.take(self.store.lengths[:, 1], others), room))
        return ids, others, np.column_stack([own[:, :2], mismatched]).astype(own.dtype)

    def read(self, visits: PairIds) -> ExampleBatch:
        visits = np.asarray(visits, dtype=np.int64)
        ids, others, _ = self.gather(visits)
        examples = []
        for example, other in zip(self.store.read(ids).pairs, others.tolist(), strict=True):
            responses = example.responses
            if other >= 0:
                answer, mask, _ = self.store[other].responses[0]
                room = self.store.longest_pair - len(example.prompt_ids)
                responses = (*responses, Response(answer[:room], None if mask is None else mask[:room], 0.0))
            examples.append(replace(example, responses=responses))
        return ExampleBatch(visits, tuple(examples))


class MismatchedAlone:
    """The visits with their mismatched answer alone, or with their own where they have no mismatched one."""

    def __init__(self, visits: MismatchedAnswers) -> None:
        self._visits = visits

    def __len__(self) -> int:
        return len(self._visits)

    @property
    def lengths(self) -> Lengths:
        lengths = np.array(self._visits.lengths)
        lengths[:, 1] = np.where(lengths[:, 2] > 0, lengths[:, 2], lengths[:, 1])
        return lengths[:, :2]

    def read(self, visits: PairIds) -> ExampleBatch:
        batch = self._visits.read(visits)
        return replace(batch, pairs=tuple(replace(each, responses=each.responses[-1:]) for each in batch.pairs))

    def hashes(self) -> Iterator[Hashes]:
        """Yield the content hashes of each step's visits."""
        for step in range(self._visits.plan.num_steps):
            hashes = [hash_pair(example).pair for example in self.read(self._visits.plan.pair_ids(step)).pairs]
            yield np.frombuffer(b"".join(hashes), dtype=HASH_DTYPE)


class _VisitLengths:
    """The lengths of visits, indexed like an array; those of a step are computed together."""

    def __init__(self, visits: MismatchedAnswers) -> None:
        self._visits = visits

    def __len__(self) -> int:
        return len(self._visits)

    def __getitem__(self, visits: PairIds) -> Lengths:
        return self._visits.gather(visits)[2]

    def take(self, visits: PairIds, **_: Any) -> Lengths:
        """What np.take calls."""
        return self[visits]

    def __array__(self, *_: Any, **__: Any) -> Lengths:
        plan = self._visits.plan
        return np.concatenate([self[plan.pair_ids(step)] for step in range(plan.num_steps)])


def rotate(ids: PairIds, prompts: npt.NDArray[np.void]) -> PairIds:
    """Return for each example of a step another one with a different prompt, whose answer it gets; -1 for none.

    Each answer is used once, unless more than half of the prompts are equal. If all prompts differ, it is the example
    before, cyclically.
    """
    keys = prompts.view("<u8")[::2]  # half of the hash tells prompts apart, and sorts ten times faster
    in_order = np.sort(keys)
    if (in_order[1:] != in_order[:-1]).all() and len(ids) > 1:
        return np.roll(ids, 1)
    _, first, group, counts = np.unique(keys, return_index=True, return_inverse=True, return_counts=True)
    if len(counts) == 1:
        return np.full(len(ids), -1, dtype=np.int64)
    others, most = np.empty_like(ids), int(counts.max())
    if 2 * most <= len(ids):
        # equal prompts stand together; so many examples before one of them, the prompt is a different one
        order = np.argsort(first[group], kind="stable")
        others[order] = ids[np.roll(order, most)]
        return others
    is_most = group == counts.argmax()
    frequent, rest = np.flatnonzero(is_most), np.flatnonzero(~is_most)
    others[rest] = ids[frequent[: len(rest)]]
    others[frequent] = ids[np.resize(rest, most)]
    return others


Examples: TypeAlias = ExampleStore | MismatchedAnswers
