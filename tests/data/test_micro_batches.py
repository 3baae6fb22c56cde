"""Ranks and micro-batches divide a step: no pair lost or repeated, budgets held, work even."""

from __future__ import annotations

import gzip
import json
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thresher.data.batching.balance import CostModel, assign_ranks, bin_by_tokens
from thresher.data.batching.micro_batches import MicroBatching
from thresher.data.batching.plan import make_plan

unhurried = settings(deadline=None, max_examples=60)
SHARED = CostModel(attention_per_key=1 / 3072, shares_prompt=True)
APART = CostModel(attention_per_key=1 / 3072, shares_prompt=False)
LENGTHS = st.lists(st.tuples(st.integers(1, 900), st.integers(1, 400), st.integers(1, 400)), min_size=1, max_size=80)


def as_lengths(rows: list[tuple[int, int, int]]) -> np.ndarray:
    return np.array(rows, dtype=np.uint32)


def cut_all(batching: MicroBatching, ids: np.ndarray, num_ranks: int) -> list[list[list[int]]]:
    return [[batch.tolist() for batch in batching.split(ids, rank, num_ranks)] for rank in range(num_ranks)]


@unhurried
@given(LENGTHS, st.integers(1, 64), st.integers(1, 4000), st.sampled_from([SHARED, APART]))
def test_every_pair_of_a_step_is_in_one_micro_batch_of_one_rank_and_budgets_hold(rows, num_ranks, budget, costs):
    lengths = as_lengths(rows)
    ids = np.arange(len(rows))[::-1].copy()
    shares = cut_all(MicroBatching(lengths, costs, max_tokens=budget), ids, num_ranks)
    found = [i for share in shares for batch in share for i in batch]
    assert sorted(found) == list(range(len(rows)))
    counts = [sum(map(len, share)) for share in shares]
    assert max(counts) - min(counts) <= 1
    tokens = costs.tokens(lengths)
    for share in shares:
        for batch in share:
            assert sum(tokens[batch]) <= budget or len(batch) == 1  # a pair over the budget is alone


@unhurried
@given(LENGTHS, st.integers(1, 8), st.integers(1, 16), st.one_of(st.none(), st.integers(1, 8000)))
def test_padded_batches_hold_their_number_of_pairs_and_their_budget(rows, num_ranks, max_pairs, budget):
    lengths = as_lengths(rows)
    batching = MicroBatching(lengths, APART, max_tokens=budget, max_pairs=max_pairs)
    shares = cut_all(batching, np.arange(len(rows)), num_ranks)
    assert sorted(i for share in shares for batch in share for i in batch) == list(range(len(rows)))
    widths = lengths[:, 0] + lengths[:, 1:].max(axis=1)
    for share in shares:
        for batch in share:
            assert 1 <= len(batch) <= max_pairs
            assert budget is None or 2 * len(batch) * max(widths[batch]) <= budget or len(batch) == 1


@unhurried
@given(LENGTHS, st.integers(1, 4000))
def test_best_fit_needs_at_most_twice_the_bins_that_must_be(rows, budget):
    tokens = np.minimum(SHARED.tokens(as_lengths(rows)), budget)
    bins = bin_by_tokens(tokens, budget)
    assert len(bins) <= max(1, -(-2 * int(tokens.sum()) // budget))


def best_fit_by_search(tokens: list[int], budget: int) -> list[list[int]]:
    """Best-fit-decreasing as the books tell it: look at every bin, take the fullest that fits, the oldest of equals."""
    bins: list[list[int]] = []
    for index in sorted(range(len(tokens)), key=lambda i: (-tokens[i], i)):
        rooms = [budget - sum(tokens[i] for i in chosen) for chosen in bins]
        fitting = [i for i, room in enumerate(rooms) if room >= tokens[index]]
        if fitting:
            bins[min(fitting, key=lambda i: (rooms[i], i))].append(index)
        else:
            bins.append([index])
    return [sorted(chosen) for chosen in bins]


@unhurried
@given(st.lists(st.integers(0, 60), max_size=60), st.integers(1, 100))
def test_bins_are_those_of_a_search_through_all_bins(tokens, budget):
    found = bin_by_tokens(np.array(tokens, dtype=np.int64), budget)
    assert [chosen.tolist() for chosen in found] == best_fit_by_search(tokens, budget)


def test_bins_by_hand():
    """Budget 10 and sizes 12 6 5 4 5 3: 12 is alone, 6 + 4, 5 + 5, and 3 needs a bin of its own."""
    found = bin_by_tokens(np.array([12, 6, 5, 4, 5, 3]), 10)
    assert [chosen.tolist() for chosen in found] == [[0], [1, 3], [2, 4], [5]]


@pytest.mark.parametrize("budget", [600, 2048, 16_384])
def test_sixteen_thousand_pairs_are_binned_without_a_search_through_all_bins(budget):
    tokens = SHARED.tokens(np.random.default_rng(0).integers(1, 500, (16_384, 3), dtype=np.uint32))
    times = []
    for _ in range(3):
        started = time.perf_counter()
        bin_by_tokens(tokens, budget)
        times.append(time.perf_counter() - started)
    print(f"{min(times) * 1e3:.0f} ms")
    assert min(times) < 0.3, times  # 12 to 30 ms measured


@unhurried
@given(st.lists(st.floats(0, 1e12), min_size=1, max_size=60), st.integers(1, 20))
def test_shares_follow_the_rule_of_the_longest_first(costs, num_ranks):
    """Loads are no worse than dealing rounds in exact order allows: the spread is at most one largest cost."""
    ranks = assign_ranks(np.array(costs), num_ranks)
    counts = np.bincount(ranks, minlength=num_ranks)
    assert counts.max() - counts.min() <= 1
    loads = np.bincount(ranks, weights=costs, minlength=num_ranks)
    # 16-bit keys of the order misplace a cost by at most 1 / 65,535 of the largest, once a round
    assert loads.max() - loads.min() <= max(costs) * (1 + len(costs) / 65_535) + 1e-6


def test_tokens_and_costs_by_hand():
    """Prompt 10, chosen 4, rejected 3: 10 + 3 + 2 rows shared, 23 + 2 apart; keys seen are half squares."""
    lengths = as_lengths([(10, 4, 3)])
    assert SHARED.tokens(lengths).tolist() == [15]
    assert APART.tokens(lengths).tolist() == [25]
    keys_apart = (14**2 + 13**2) / 2
    assert APART.costs(lengths).tolist() == pytest.approx([25 + keys_apart / 3072])
    assert SHARED.costs(lengths).tolist() == pytest.approx([15 + (keys_apart - 10**2 / 2) / 3072])


@pytest.mark.parametrize("num_ranks", [8, 64, 1024])
@pytest.mark.real
def test_work_is_even_over_ranks_on_real_lengths(num_ranks, shared_data):
    """Lengths of HH-RLHF in characters over four; 128 pairs a rank; the costliest rank is within 5 % of the mean."""
    rows = []
    with gzip.open(shared_data / "hh-rlhf-test" / "helpful-base.test.jsonl.gz", "rt") as lines:
        for line in lines:
            pair = json.loads(line)
            start = pair["chosen"].rfind("\n\nAssistant:") + len("\n\nAssistant:")
            rows.append(
                (start // 4, len(pair["chosen"]) // 4 + 1 - start // 4, max(1, len(pair["rejected"]) - start) // 4 + 1)
            )
    lengths = as_lengths(rows)[np.random.default_rng(0).integers(0, len(rows), 128 * num_ranks)]
    costs = SHARED.costs(lengths)
    started = time.perf_counter()
    ranks = assign_ranks(costs, num_ranks)
    assert time.perf_counter() - started < 0.1  # 3 ms measured
    loads = np.bincount(ranks, weights=costs, minlength=num_ranks)
    assert loads.max() / loads.mean() <= 1.05
    assert np.bincount(ranks).tolist() == [128] * num_ranks


@pytest.mark.slow
def test_a_hundred_million_pairs_start_at_once_and_a_step_is_cheap(tmp_path):
    """A lengths index of 1.2 GB, memory-mapped and sparse; the step of 1,024 ranks with 128 pairs each."""
    num_pairs = 100_000_000
    with (tmp_path / "lengths.bin").open("wb") as file:
        file.truncate(num_pairs * 3 * 4)
    started = time.perf_counter()
    lengths = np.memmap(tmp_path / "lengths.bin", dtype="<u4", mode="r+", shape=(num_pairs, 3))
    plan = make_plan(num_pairs, seed=1, pairs_per_step=131_072, max_steps=None, num_epochs=2)
    ids = plan.pair_ids(1000)
    lengths[ids] = np.random.default_rng(0).integers(1, 500, (len(ids), 3))
    assert time.perf_counter() - started < 20
    times = []
    for _ in range(5):
        started = time.perf_counter()
        batches = MicroBatching(lengths, SHARED, max_tokens=4096).split(plan.pair_ids(1000), rank=77, num_ranks=1024)
        times.append(time.perf_counter() - started)
    assert sum(map(len, batches)) == 128
    print(f"{min(times) * 1e3:.0f} ms a step")
    assert min(times) < 0.1, times  # 16 to 29 ms measured
