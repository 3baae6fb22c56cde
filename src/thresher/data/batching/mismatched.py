"""Labelled examples as KTO reads them: next to each answer, one to a different prompt of the same step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from thresher.data.batching.plan import PairIds, Plan
from thresher.data.example import ExampleBatch, Response
from thresher.data.store.arrow_schema import hash_example
from thresher.data.store.reader import HASH_DTYPE, ExampleStore, Hashes, Lengths


class VisitPlan(Plan):
    """The steps of a plan, whose pairs are numbered in the order of visits, counting repeats."""

    def pair_ids(self, step: int) -> PairIds:
        epoch, step_in_epoch = divmod(step, self.steps_per_epoch)
        start = step_in_epoch * self.pairs_per_step
        stop = min(start + self.pairs_per_step, self.num_pairs)
        return epoch * self.num_pairs + np.arange(start, stop, dtype=np.int64)

    def visited_pairs(self) -> PairIds:
        return np.arange(self.num_visits, dtype=np.int64)

    def example_ids(self, step: int) -> PairIds:
        """Return the row numbers of a step's examples in the store, in plan order."""
        return super().pair_ids(step)


class MismatchedAnswers:
    """The visits of a plan, numbered in the order of its steps; each is a labelled example with a second response.

    That response is the answer of the example before it in the step, or of the nearest one with a different prompt, cut
    to the length of the longest example. A step whose prompts are all equal has none. 40 bytes of memory per visit.
    """

    def __init__(self, store: ExampleStore, plan: VisitPlan) -> None:
        self._store, self._plan = store, plan

    @classmethod
    def in_one_step(cls, store: ExampleStore) -> MismatchedAnswers:
        """The examples of a validation set, as one step."""
        return cls(store, VisitPlan(len(store), seed=0, pairs_per_step=len(store), num_steps=1))

    def __len__(self) -> int:
        return self._plan.num_visits

    def number_in_files(self, visit: int) -> int:
        return self._store.number_in_files(int(self._examples_and_others[0][visit]))

    @cached_property
    def _examples_and_others(self) -> tuple[PairIds, PairIds]:
        """The example of each visit, and the one whose answer stands next to its own, -1 for none."""
        by_step = [self._plan.example_ids(step) for step in range(self._plan.num_steps)]
        others = [rotate(ids, self._store.prompt_hashes(ids)) for ids in by_step]
        return np.concatenate(by_step), np.concatenate(others)

    @cached_property
    def lengths(self) -> Lengths:
        """Tokens of (prompt, answer, mismatched answer) of each visit."""
        examples, others = self._examples_and_others
        lengths = np.take(self._store.lengths, examples, axis=0)
        room = self._store.longest_example - lengths[:, 0].astype(np.int64)
        mismatched = np.where(others < 0, 0, np.minimum(self._store.lengths[others, 1], room))
        return np.column_stack([lengths[:, :2], mismatched]).astype(lengths.dtype)

    def read(self, visits: PairIds) -> ExampleBatch:
        visits = np.asarray(visits, dtype=np.int64)
        ids, others = (each[visits] for each in self._examples_and_others)
        examples = []
        for example, other in zip(self._store.read(ids).pairs, others.tolist(), strict=True):
            responses = example.responses
            if other >= 0:
                answer, mask, _ = self._store[other].responses[0]
                room = self._store.longest_example - len(example.prompt_ids)
                responses = (*responses, Response(answer[:room], None if mask is None else mask[:room], 0.0))
            examples.append(replace(example, responses=responses))
        return ExampleBatch(visits, tuple(examples))

    def hashes(self) -> Iterator[Hashes]:
        """Yield the content hashes of each step's visits."""
        for step in range(self._plan.num_steps):
            hashes = [hash_example(example).pair for example in self.read(self._plan.pair_ids(step)).pairs]
            yield np.frombuffer(b"".join(hashes), dtype=HASH_DTYPE)


def rotate(ids: PairIds, prompts: npt.NDArray[np.void]) -> PairIds:
    """Return for each example of a step the nearest one before it, cyclically, with a different prompt; -1 for none."""
    # where the prompt differs from the one before: every example of a run of equal prompts takes what precedes the run
    starts = np.flatnonzero(prompts != np.roll(prompts, 1))
    if not len(starts):
        return np.full(len(ids), -1, dtype=np.int64)
    # index -1 is the run that begins at the end of the step
    run = np.searchsorted(starts, np.arange(len(ids)), side="right") - 1
    return ids[starts[run] - 1]


Examples: TypeAlias = ExampleStore | MismatchedAnswers
