"""The rows that each micro-batch of a step has in a layout, from the lengths of its pairs alone.

Every response token counts as scored: a store's lengths do not say which turns of a conversation are masked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from functools import cached_property
from itertools import islice

import numpy as np
import numpy.typing as npt

from thresher.data.batching.batches import MicroBatching
from thresher.data.batching.plan import PairIds, Plan
from thresher.data.store.reader import Lengths
from thresher.models.layouts import Layout

# what strategies/native/sequential.py scores in place of a batch without pairs
_DUMMY = np.array([[2, 2, 2]], dtype=np.uint32)
_SAMPLED_STEPS, _SAMPLED_RANKS = 8, 64


@dataclass(frozen=True)
class Rows:
    """Rows of a micro-batch.

    total: in the model's input, padding included. scored: that reach the LM head. kept: that the last layer computes
    if it skips others. attended: keys that its queries attend to, summed. useful: tokens of both sequences of pairs.
    """

    total: int
    scored: int
    kept: int
    attended: int
    useful: int
    pairs: int

    def padded_to(self, multiple: int) -> int:
        return -(-self.total // multiple) * multiple


def rows_of(lengths: Lengths, layout: Layout) -> Rows:
    """Count the rows of a micro-batch: lengths [pairs, (prompt, chosen, rejected)]."""
    return rows_of_batches(lengths, [np.arange(len(lengths))], layout)[0]


def rows_of_batches(lengths: Lengths, batches: Sequence[npt.NDArray[np.int64]], layout: Layout) -> tuple[Rows, ...]:
    """Count the rows of micro-batches, each as positions in lengths."""
    if not batches:
        return ()
    order, sizes = np.concatenate(batches), [len(batch) for batch in batches]
    starts = np.cumsum([0, *sizes[:-1]])
    prompt, chosen, rejected = lengths[order].astype(np.int64).T
    both = (prompt + chosen, prompt + rejected)
    useful = both[0] + both[1]
    scored = useful - 2 if layout.scores_prompt else chosen + rejected
    if layout.needs_pair_attention:
        if layout.shares_prompt:
            total = prompt + chosen - 1 + np.maximum(rejected - 1, 0)
            kept = total if layout.scores_prompt else chosen + np.maximum(rejected - 1, 0)
            attended = _causal(both[0] - 1) + _causal(both[1] - 1) - _causal(prompt)
        else:
            total = useful - 2
            kept = total if layout.scores_prompt else scored
            attended = _causal(both[0] - 1) + _causal(both[1] - 1)
    else:
        width = np.maximum.reduceat(np.maximum(*both), starts).repeat(sizes)
        total = kept = 2 * width
        attended = 2 * _causal(width)
    pairs = np.ones_like(total)
    sums = np.add.reduceat(np.stack([total, scored, kept, attended, useful, pairs], axis=1), starts)
    return tuple(Rows(*numbers) for numbers in sums.tolist())


def _causal(length: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Keys that the queries of causal sequences attend to."""
    return length * (length + 1) // 2


def dummy_rows(layout: Layout) -> Rows:
    """The rows of a batch without pairs; none of them is useful."""
    rows = rows_of(_DUMMY, layout)
    return Rows(rows.total, rows.scored, rows.kept, rows.attended, useful=0, pairs=0)


@dataclass(frozen=True)
class Step:
    """The micro-batches of one data-parallel rank in a step, and how many the rank with most of them has."""

    micro_batches: tuple[Rows, ...]
    most_micro_batches: int

    def in_lockstep(self, layout: Layout) -> Step:
        """Add the dummy batches of a rank that has fewer micro-batches than another one."""
        missing = self.most_micro_batches - len(self.micro_batches)
        return Step((*self.micro_batches, *[dummy_rows(layout)] * missing), self.most_micro_batches)


def step_of_rank(batching: MicroBatching, pair_ids: PairIds, layout: Layout, rank: int, num_ranks: int) -> Step:
    return _steps_of_ranks(batching, pair_ids, layout, [rank], num_ranks)[0]


def _steps_of_ranks(
    batching: MicroBatching, pair_ids: PairIds, layout: Layout, ranks: Sequence[int], num_ranks: int
) -> list[Step]:
    split = batching.split_ranks(pair_ids, ranks, num_ranks)
    rows = iter(rows_of_batches(batching.lengths, [ids for batches in split for ids in batches], layout))
    return [Step(tuple(islice(rows, len(batches))), len(batches)) for batches in split]


@dataclass(frozen=True)
class Workload:
    """Sampled steps of a run, each as its slowest data-parallel rank computes it.

    largest: the micro-batch with most rows. most_micro_batches: of a rank in a step. is_assumed: the lengths are
    assumed, not those of the pairs.
    """

    steps: tuple[Step, ...]
    largest: Rows
    most_micro_batches: int
    plan: Plan
    layout: str
    useful_per_step: float
    rows_per_step: float
    padded_rows_per_step: float
    is_assumed: bool

    @property
    def saved_rows(self) -> float:
        """Share of rows that the layout saves, compared with rows padded to the longest of each micro-batch."""
        return 1 - self.rows_per_step / self.padded_rows_per_step

    @cached_property
    def condensed(self) -> Workload:
        """The median step alone, as equal micro-batches: the same sums up to rounding, in a fraction of the time."""
        by_rows = sorted(self.steps, key=lambda step: sum(rows.total for rows in step.micro_batches))
        step = by_rows[len(by_rows) // 2]
        count = len(step.micro_batches)
        sums = np.sum([astuple(rows) for rows in step.micro_batches], axis=0)
        mean = Rows(*(max(1, round(number / count)) for number in sums.tolist()))
        return replace(self, steps=(Step((mean,) * count, step.most_micro_batches),))


def sampled_steps(plan: Plan, *, is_assumed: bool = False) -> list[int]:
    """Evenly spaced steps of the first epoch; assumed pairs are alike, and so are their steps."""
    num_steps = min(plan.num_steps, plan.steps_per_epoch)
    numbers = np.unique(np.linspace(0, num_steps - 1, 1 if is_assumed else _SAMPLED_STEPS).astype(int))
    return [int(number) for number in numbers]


def sample_workload(
    plan: Plan, batching: MicroBatching, layout: Layout, num_ranks: int, *, is_assumed: bool = False
) -> Workload:
    """Split the sampled steps as training would."""
    numbers = sampled_steps(plan, is_assumed=is_assumed)
    ranks = np.unique(np.linspace(0, num_ranks - 1, _SAMPLED_RANKS).astype(int))
    slowest, everything, padded, num_useful = [], [], 0.0, 0.0
    for number in numbers:
        ids = plan.pair_ids(number)
        steps = _steps_of_ranks(batching, ids, layout, ranks.tolist(), num_ranks)
        most = max(len(step.micro_batches) for step in steps)
        costliest = max(steps, key=lambda step: sum(rows.total for rows in step.micro_batches))
        slowest.append(Step(costliest.micro_batches, most).in_lockstep(layout))
        everything += [rows for step in steps for rows in step.micro_batches]
        lengths = batching.lengths[ids].astype(np.int64)
        num_useful += float((2 * lengths[:, 0] + lengths[:, 1] + lengths[:, 2]).sum())
        padded += _padded_rows(batching.lengths[ids], max(1, round(len(ids) / num_ranks / max(1, most))))
    share = num_ranks / len(ranks) / len(numbers)
    largest = max(everything, key=lambda rows: rows.total)
    rows = share * sum(rows.total for rows in everything)
    return Workload(
        tuple(slowest),
        largest,
        max(step.most_micro_batches for step in slowest),
        plan,
        layout.name,
        num_useful / len(numbers),
        rows,
        padded / len(numbers),
        is_assumed,
    )


def _padded_rows(lengths: Lengths, pairs_per_batch: int) -> float:
    """Rows of padded micro-batches of consecutive pairs."""
    widths = (lengths[:, :1] + lengths[:, 1:]).max(axis=1).astype(np.int64)
    starts = np.arange(0, len(widths), pairs_per_batch)
    sizes = np.diff([*starts, len(widths)])
    return float(2 * (sizes * np.maximum.reduceat(widths, starts)).sum())
