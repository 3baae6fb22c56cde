"""Mixtures: which examples of several sources each epoch and each step have, as a pure function of seed and step."""

from __future__ import annotations

import time
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thresher.data.batching.batches import CostModel, MicroBatching
from thresher.data.batching.plan import Plan, Share, allocate, make_plan

SEEDS = st.integers(0, 2**32 - 1)
unhurried = settings(deadline=None, max_examples=80)


@st.composite
def mixtures(draw: st.DrawFn, order: str | None = None) -> Plan:
    """Three epochs over one to five sources of random sizes and weights."""
    sizes = draw(st.lists(st.integers(1, 60), min_size=1, max_size=5))
    shares = tuple(Share(size, max(1, round(draw(st.floats(0.02, 3.2)) * size))) for size in sizes)
    count = sum(share.count for share in shares)
    return make_plan(
        count,
        seed=draw(SEEDS),
        pairs_per_step=draw(st.integers(1, count)),
        max_steps=None,
        num_epochs=3,
        shares=shares,
        order=order or draw(st.sampled_from(["proportional", "sequential"])),
    )


def by_source(plan: Plan, ids: np.ndarray) -> list[Counter[int]]:
    """Count the visits of each row of each source."""
    starts = np.cumsum([0, *(share.size for share in plan.shares)])
    of_each = np.searchsorted(starts, ids, side="right") - 1
    return [Counter((ids[of_each == at] - starts[at]).tolist()) for at in range(len(plan.shares))]


def visited_by(plan: Plan) -> list[int]:
    visited = plan.visited_pairs()
    return np.flatnonzero(visited.mask(0, visited.num_pairs)).tolist()


def ids_of(plan: Plan, epoch: int) -> np.ndarray:
    steps = range(epoch * plan.steps_per_epoch, (epoch + 1) * plan.steps_per_epoch)
    return np.concatenate([plan.pair_ids(step) for step in steps])


@unhurried
@given(mixtures())
def test_every_epoch_has_the_count_of_each_source_and_no_row_more_often_than_its_weight(plan):
    over_the_run = [Counter[int]() for _ in plan.shares]
    for epoch in range(3):
        for share, visits, total in zip(plan.shares, by_source(plan, ids_of(plan, epoch)), over_the_run, strict=True):
            assert visits.total() == share.count
            assert set(visits) <= set(range(share.size))
            every_row = [visits[row] for row in range(share.size)]
            assert set(every_row) <= {share.count // share.size, -(-share.count // share.size)}
            total += visits
    # a row that an epoch leaves out comes before another one comes again
    for share, total in zip(plan.shares, over_the_run, strict=True):
        every_row = [total[row] for row in range(share.size)]
        assert max(every_row) - min(every_row) <= 1
    assert visited_by(plan) == sorted({int(i) for epoch in range(3) for i in ids_of(plan, epoch)})


@unhurried
@given(mixtures("proportional"))
def test_every_step_has_each_sources_share(plan):
    """At any position of an epoch, what a source has given is within one of its share, times the sources' number."""
    counts = [share.count for share in plan.shares]
    total = sum(counts)
    for step in range(plan.steps_per_epoch):
        position = min((step + 1) * plan.pairs_per_step, total)
        given = allocate(position, counts)
        assert sum(given) == position
        assert all(
            abs(has - count * position / total) <= 1 + len(counts) / 2 for has, count in zip(given, counts, strict=True)
        )
    grows = np.diff([allocate(position, counts) for position in range(total + 1)], axis=0)
    assert (grows >= 0).all()
    assert (grows.sum(axis=1) == 1).all()


@unhurried
@given(mixtures("sequential"))
def test_a_sequential_epoch_visits_one_source_after_the_other(plan):
    starts = np.cumsum([0, *(share.size for share in plan.shares)])
    sources = np.searchsorted(starts, ids_of(plan, 1), side="right") - 1
    assert (np.diff(sources) >= 0).all()


def test_two_equal_sources_alternate():
    assert [allocate(position, [4, 4]) for position in range(5)] == [[0, 0], [1, 0], [1, 1], [2, 1], [2, 2]]
    assert allocate(6, [4, 1, 1]) == [4, 1, 1]


@unhurried
@given(st.integers(1, 200), SEEDS, st.integers(0, 5))
def test_one_source_of_weight_one_is_the_plan_without_sources(size, seed, step):
    plain = make_plan(size, seed=seed, pairs_per_step=min(7, size), max_steps=6, num_epochs=None)
    mixed = make_plan(
        size, seed=seed, pairs_per_step=min(7, size), max_steps=6, num_epochs=None, shares=(Share(size, size),)
    )
    assert plain.pair_ids(step).tolist() == mixed.pair_ids(step).tolist()


@settings(deadline=None, max_examples=20)
@given(mixtures(), st.integers(1, 64), st.integers(0, 2))
def test_the_ranks_divide_the_same_steps_whatever_their_number(plan, num_ranks, step):
    step = min(step, plan.num_steps - 1)
    num_examples = sum(share.size for share in plan.shares)
    lengths = np.random.default_rng(0).integers(1, 50, (num_examples, 3)).astype(np.uint32)
    batching = MicroBatching(lengths, CostModel(attention_per_key=0.001, shares_prompt=True), max_tokens=100)
    ids = plan.pair_ids(step)
    by_rank = batching.split_ranks(ids, range(num_ranks), num_ranks)
    found = [int(each) for batches in by_rank for batch in batches for each in batch]
    assert sorted(found) == sorted(ids.tolist())


def test_another_weight_of_one_source_moves_no_row_of_the_others_out_of_order():
    """What is drawn from a source depends on its own size and count alone."""
    one, other = Share(50, 25), Share(30, 30)
    rows = other.rows(np.arange(30, dtype=np.uint64), 7, 2, 1)
    plan = make_plan(
        55, seed=7, pairs_per_step=5, max_steps=None, num_epochs=3, shares=(one, other), order="proportional"
    )
    of_second = ids_of(plan, 2)[ids_of(plan, 2) >= 50] - 50
    assert of_second.tolist() == rows.tolist()


def test_a_step_of_a_hundred_million_examples_from_ten_sources_takes_milliseconds():
    sizes = [10_000_000 + 7 * at for at in range(10)]
    shares = tuple(
        Share(size, int(size * weight)) for size, weight in zip(sizes, np.linspace(0.3, 1.9, 10), strict=True)
    )
    count = sum(share.count for share in shares)
    assert count > 100_000_000
    plan = make_plan(count, seed=3, pairs_per_step=1024, max_steps=None, num_epochs=2, shares=shares)
    seconds = []
    for step in np.random.default_rng(0).integers(0, plan.num_steps, 20).tolist():
        started = time.process_time()
        ids = plan.pair_ids(step)
        seconds.append(time.process_time() - started)
        assert len(ids) == 1024 or step % plan.steps_per_epoch == plan.steps_per_epoch - 1
    # of this process alone: CI has others beside it
    assert np.median(seconds) < 0.020


@pytest.mark.parametrize("order", ["proportional", "sequential"])
def test_a_partial_run_knows_the_pairs_that_it_visits(order):
    shares = (Share(40, 10), Share(30, 45), Share(5, 5))
    for num_steps in (1, 3, 6, 9, 14):
        plan = make_plan(
            60, seed=1, pairs_per_step=10, max_steps=num_steps, num_epochs=None, shares=shares, order=order
        )
        visited = {int(i) for step in range(num_steps) for i in plan.pair_ids(step)}
        assert visited_by(plan) == sorted(visited)
