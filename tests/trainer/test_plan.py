"""The plan: every epoch a fresh permutation, every step a set of pairs that depends on nothing but the seed."""

from __future__ import annotations

import time
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thresher.data.plan import Plan, make_plan, permuted
from thresher.errors import UserError

SEEDS = st.integers(0, 2**32 - 1)
unhurried = settings(deadline=None, max_examples=60)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Three epochs over up to 150 pairs, in steps of any size that fits."""
    num_pairs = draw(st.integers(1, 150))
    pairs_per_step = draw(st.integers(1, num_pairs))
    return make_plan(num_pairs, seed=draw(SEEDS), pairs_per_step=pairs_per_step, max_steps=None, num_epochs=3)


def epoch_ids(plan: Plan, epoch: int) -> list[int]:
    steps = range(epoch * plan.steps_per_epoch, (epoch + 1) * plan.steps_per_epoch)
    return [int(i) for step in steps for i in plan.pair_ids(step)]


@unhurried
@given(plans())
def test_every_epoch_holds_every_pair_exactly_once_tails_included(plan):
    assert plan.num_steps == 3 * plan.steps_per_epoch
    for epoch in range(3):
        assert sorted(epoch_ids(plan, epoch)) == list(range(plan.num_pairs))
    assert plan.num_visits == 3 * plan.num_pairs


@unhurried
@given(SEEDS, st.integers(0, 1000))
def test_epochs_differ_in_order_and_so_do_seeds_and_nothing_else_does(seed, epoch):
    positions = np.arange(64, dtype=np.uint64)
    order = permuted(positions, 64, seed, epoch).tolist()
    assert order == permuted(positions, 64, seed, epoch).tolist()
    assert order != permuted(positions, 64, seed, epoch + 1).tolist()
    assert order != permuted(positions, 64, seed + 1, epoch).tolist()
    assert order != list(range(64))


def test_a_step_does_not_depend_on_what_was_asked_before():
    def ids(step: int) -> list[int]:
        return make_plan(97, seed=5, pairs_per_step=8, max_steps=50, num_epochs=None).pair_ids(step).tolist()

    plan = make_plan(97, seed=5, pairs_per_step=8, max_steps=50, num_epochs=None)
    in_order = [plan.pair_ids(step).tolist() for step in range(50)]
    assert [ids(step) for step in reversed(range(50))] == in_order[::-1]


def test_the_order_looks_random():
    """Mean neighbour distance of a uniform permutation of n is (n + 1) / 3, its rank correlation with itself 0."""
    order = permuted(np.arange(3000, dtype=np.uint64), 3000, seed=1, epoch=0)
    assert np.abs(np.diff(order)).mean() == pytest.approx(1000, rel=0.05)
    assert abs(np.corrcoef(order, np.arange(3000))[0, 1]) < 0.06  # three standard deviations: 3 / sqrt(3000)


def test_each_pair_is_as_likely_in_the_first_step_as_any_other():
    """2,000 seeds draw 4 of 40 pairs: 200 times each, and chi-square of 39 degrees is below 73 in 999 of 1,000."""
    first = [make_plan(40, seed=s, pairs_per_step=4, max_steps=1, num_epochs=None).pair_ids(0) for s in range(2000)]
    counts = np.bincount(np.concatenate(first), minlength=40)
    assert ((counts - 200) ** 2 / 200).sum() < 73


@pytest.mark.parametrize(
    ("num_pairs", "per_step", "max_steps", "num_epochs", "num_steps"),
    [
        (40, 8, None, None, 5),  # one epoch
        (41, 8, None, None, 6),  # the tail is a step
        (40, 8, 3, None, 3),
        (40, 8, 12, None, 12),  # max_steps alone runs through epochs
        (40, 8, 12, 1.0, 5),  # whichever ends first
        (40, 8, 3, 1.0, 3),
        (40, 8, None, 0.5, 3),  # 2.5 steps
        (40, 8, None, 0.01, 1),  # never none
        (40, 8, None, 2.4, 12),
        (1000, 10, None, 0.07, 7),  # 7.000000000000001 in floating point
        (30, 10, None, 0.1 * 3 * 10, 9),
        (8, 8, None, 1.0, 1),
    ],
)
def test_the_number_of_steps(num_pairs, per_step, max_steps, num_epochs, num_steps):
    plan = make_plan(num_pairs, seed=0, pairs_per_step=per_step, max_steps=max_steps, num_epochs=num_epochs)
    assert plan.num_steps == num_steps


@unhurried
@given(plans(), st.data())
def test_visits_and_visited_pairs_are_those_of_the_steps(plan, data):
    cut = Plan(plan.num_pairs, plan.seed, plan.pairs_per_step, data.draw(st.integers(1, plan.num_steps)))
    ids = [int(i) for step in range(cut.num_steps) for i in cut.pair_ids(step)]
    assert cut.num_visits == len(ids)
    assert cut.visited_pairs().tolist() == sorted(set(ids))


def test_a_set_smaller_than_one_batch_is_an_error_that_names_the_mend():
    with pytest.raises(UserError) as caught:
        make_plan(7, seed=0, pairs_per_step=8, max_steps=10, num_epochs=None)
    assert str(caught.value) == (
        "the training set has 7 pairs, fewer than one global batch of 8; lower "
        "actor_train.training_args.per_device_train_batch_size or gradient_accumulation_steps, or add data"
    )


def test_a_step_outside_the_plan_is_an_error():
    plan = make_plan(8, seed=0, pairs_per_step=4, max_steps=None, num_epochs=None)
    for step in (-1, 2):
        with pytest.raises(IndexError, match="outside the plan of 2 steps"):
            plan.pair_ids(step)


def test_a_far_step_of_a_hundred_million_pairs_is_found_at_once_and_without_an_index():
    plan = make_plan(100_000_000, seed=3, pairs_per_step=512, max_steps=None, num_epochs=5)
    plan.pair_ids(0)
    tracemalloc.start()
    started = time.perf_counter()
    ids = plan.pair_ids(plan.num_steps - 2)
    seconds = time.perf_counter() - started
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(set(ids.tolist())) == 512
    assert (ids >= 0).all()
    assert (ids < 100_000_000).all()
    assert seconds < 0.05
    assert peak < 1_000_000
    tail = plan.pair_ids(plan.steps_per_epoch - 1)
    assert len(tail) == 100_000_000 % 512
