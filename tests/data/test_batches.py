"""Pairs in batches: each pair once, within the budgets, micro-batches at equal cost per rank, blocks of equal size."""

from __future__ import annotations

import gzip
import itertools
import json
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thresher.data.batching import batches
from thresher.data.batching.batches import (
    Blocks,
    CostModel,
    MicroBatching,
    ScoringBatching,
    assign_ranks,
    bin_by_tokens,
    most_bins,
    num_sequences,
)
from thresher.data.batching.plan import make_plan, permuted

unhurried = settings(deadline=None, max_examples=60)
SHARED = CostModel(attention_per_key=1 / 3072, shares_prompt=True)
SEPARATE = CostModel(attention_per_key=1 / 3072, shares_prompt=False)
LENGTHS = st.lists(st.tuples(st.integers(1, 900), st.integers(1, 400), st.integers(1, 400)), min_size=1, max_size=80)


def as_lengths(rows: list[tuple[int, int, int]]) -> np.ndarray:
    return np.array(rows, dtype=np.uint32)


def split_all(batching: MicroBatching, ids: np.ndarray, num_ranks: int) -> list[list[list[int]]]:
    return [[batch.tolist() for batch in batching.split(ids, rank, num_ranks)] for rank in range(num_ranks)]


@unhurried
@given(LENGTHS, st.integers(1, 64), st.integers(1, 4000), st.sampled_from([SHARED, SEPARATE]))
def test_every_pair_is_in_one_micro_batch_of_one_rank_within_the_token_budget(rows, num_ranks, budget, costs):
    lengths = as_lengths(rows)
    ids = np.arange(len(rows))[::-1].copy()
    per_rank = split_all(MicroBatching(lengths, costs, max_tokens=budget), ids, num_ranks)
    found = [i for batches in per_rank for batch in batches for i in batch]
    assert sorted(found) == list(range(len(rows)))
    counts = [sum(map(len, batches)) for batches in per_rank]
    assert max(counts) - min(counts) <= 1
    tokens = costs.tokens(lengths)
    for batch in itertools.chain.from_iterable(per_rank):
        assert sum(tokens[batch]) <= budget or len(batch) == 1  # a pair over the budget is alone


@unhurried
@given(LENGTHS, st.integers(1, 8), st.integers(1, 16), st.one_of(st.none(), st.integers(1, 8000)))
def test_padded_batches_respect_max_pairs_and_the_token_budget(rows, num_ranks, max_pairs, budget):
    lengths = as_lengths(rows)
    batching = MicroBatching(lengths, SEPARATE, max_tokens=budget, max_pairs=max_pairs)
    batches = [batch for batches in split_all(batching, np.arange(len(rows)), num_ranks) for batch in batches]
    assert sorted(i for batch in batches for i in batch) == list(range(len(rows)))
    widths = lengths[:, 0] + lengths[:, 1:].max(axis=1)
    for batch in batches:
        assert 1 <= len(batch) <= max_pairs
        assert budget is None or 2 * len(batch) * max(widths[batch]) <= budget or len(batch) == 1


@unhurried
@given(LENGTHS, st.integers(1, 4000))
def test_best_fit_uses_at_most_twice_the_minimum_number_of_bins(rows, budget):
    tokens = np.minimum(SHARED.tokens(as_lengths(rows)), budget)
    bins = bin_by_tokens(tokens, budget)
    assert len(bins) <= max(1, -(-2 * int(tokens.sum()) // budget))


BATCHINGS = st.builds(
    dict,
    costs=st.sampled_from([SHARED, SEPARATE]),
    max_tokens=st.one_of(st.none(), st.integers(1, 4000)),
    max_pairs=st.one_of(st.none(), st.integers(1, 8)),
)
RAGGED_LENGTHS = st.lists(
    st.tuples(st.integers(1, 900), st.integers(1, 400), st.integers(0, 400), st.integers(0, 400)),
    min_size=1,
    max_size=120,
)


@settings(deadline=None, max_examples=200)
@given(RAGGED_LENGTHS, st.integers(1, 40), BATCHINGS)
def test_ranks_in_lockstep_get_their_split_and_as_many_micro_batches_as_the_longest(rows, num_ranks, options):
    batching = MicroBatching(np.array(rows, dtype=np.uint32), **options)
    ids = np.random.default_rng(0).permutation(len(rows))
    expected = split_all(batching, ids, num_ranks)
    most = max(map(len, expected))
    for rank, own in enumerate(expected):
        found = [batch.tolist() for batch in batching.split_in_lockstep(ids, rank, num_ranks)]
        assert found == own + [[]] * (most - len(own))


@settings(deadline=None, max_examples=200)
@given(st.lists(st.lists(st.integers(0, 60), min_size=5, max_size=6), min_size=1, max_size=8), st.integers(1, 100))
def test_the_bins_of_all_ranks_are_counted_as_they_are_filled(ranks, budget):
    tokens = np.array([size for sizes in ranks for size in sizes])
    assigned = np.repeat(np.arange(len(ranks), dtype=np.int32), [len(sizes) for sizes in ranks])
    expected = max(len(bin_by_tokens(np.array(sizes), budget)) for sizes in ranks)
    assert most_bins(tokens, assigned, budget) == expected
    # sizes, ranks and positions that do not fit into one integer
    assert most_bins(tokens << 50, assigned, budget << 50) == expected


def test_a_rank_in_lockstep_bins_its_own_pairs_alone(monkeypatch):
    binned = []

    def count_and_bin(tokens, budget):
        binned.append(len(tokens))
        return bin_by_tokens(tokens, budget)

    monkeypatch.setattr("thresher.data.batching.batches.bin_by_tokens", count_and_bin)
    lengths = np.random.default_rng(0).integers(1, 500, (4096, 3)).astype(np.uint32)
    MicroBatching(lengths, SHARED, max_tokens=600).split_in_lockstep(np.arange(4096), 77, 1024)
    assert binned == [4]


def test_a_step_of_sixteen_thousand_ranks_is_not_binned_for_all_of_them():
    lengths = np.random.default_rng(0).integers(1, 500, (65_536, 3), dtype=np.uint32)
    times = []
    for _ in range(3):
        started = time.process_time()
        MicroBatching(lengths, SHARED, max_tokens=1200).split_in_lockstep(np.arange(65_536), 77, 16_384)
        times.append(time.process_time() - started)
    assert min(times) < 0.15, times  # 11 ms measured, and 1,200 ms for the bins of all ranks


def best_fit_by_search(tokens: list[int], budget: int) -> list[list[int]]:
    """Textbook best-fit decreasing: of all bins with room, take the fullest, and the oldest of equally full ones."""
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
def test_bins_match_a_search_of_all_bins(tokens, budget):
    found = bin_by_tokens(np.array(tokens, dtype=np.int64), budget)
    assert [chosen.tolist() for chosen in found] == best_fit_by_search(tokens, budget)


def test_bins_match_hand_computed_values():
    """Budget 10 and sizes 12 6 5 4 5 3: 12 alone, 6 + 4, 5 + 5, and 3 in a new bin."""
    found = bin_by_tokens(np.array([12, 6, 5, 4, 5, 3]), 10)
    assert [chosen.tolist() for chosen in found] == [[0], [1, 3], [2, 4], [5]]


@pytest.mark.parametrize("budget", [600, 2048, 16_384])
def test_binning_sixteen_thousand_pairs_does_not_search_all_bins(budget):
    tokens = SHARED.tokens(np.random.default_rng(0).integers(1, 500, (16_384, 3), dtype=np.uint32))
    times = []
    for _ in range(3):
        started = time.process_time()
        bin_by_tokens(tokens, budget)
        times.append(time.process_time() - started)
    print(f"{min(times) * 1e3:.0f} ms")
    assert min(times) < 0.3, times  # 12 to 30 ms measured


@unhurried
@given(st.lists(st.floats(0, 1e12), min_size=1, max_size=60), st.integers(1, 20))
def test_rank_loads_differ_by_at_most_the_largest_cost(costs, num_ranks):
    """The bound of longest-processing-time scheduling in rounds, with the costs in exact order."""
    ranks = assign_ranks(np.array(costs), num_ranks)
    counts = np.bincount(ranks, minlength=num_ranks)
    assert counts.max() - counts.min() <= 1
    loads = np.bincount(ranks, weights=costs, minlength=num_ranks)
    # 16-bit sort keys misplace a cost by at most 1 / 65,535 of the largest, once per round
    assert loads.max() - loads.min() <= max(costs) * (1 + len(costs) / 65_535) + 1e-6


def test_tokens_and_costs_match_hand_computed_values():
    """Prompt 10, chosen 4, rejected 3: 10 + 3 + 2 tokens shared, 23 + 2 separate; causal attention is half a square."""
    lengths = as_lengths([(10, 4, 3)])
    assert SHARED.tokens(lengths).tolist() == [15]
    assert SEPARATE.tokens(lengths).tolist() == [25]
    num_keys = (14**2 + 13**2) / 2
    assert SEPARATE.costs(lengths).tolist() == pytest.approx([25 + num_keys / 3072])
    assert SHARED.costs(lengths).tolist() == pytest.approx([15 + (num_keys - 10**2 / 2) / 3072])


def test_absent_responses_have_neither_tokens_nor_cost():
    """Prompt 10 with responses of 4, 3 and 5 tokens: 10 + 3 + 2 + 4 shared, 30 + 9 separate."""
    ragged = np.array([(10, 4, 3, 5, 0), (10, 4, 3, 0, 0), (10, 4, 0, 0, 0)], dtype=np.uint32)
    assert SHARED.tokens(ragged).tolist() == [19, 15, 13]
    assert SEPARATE.tokens(ragged).tolist() == [39, 25, 13]
    assert num_sequences(ragged).tolist() == [3, 2, 1]
    for width in (2, 3, 4):  # with no more columns than needed
        row = ragged[4 - width, :width].reshape(1, -1)
        for costs in (SHARED, SEPARATE):
            assert costs.tokens(row) == costs.tokens(ragged)[4 - width]
            assert costs.costs(row) == costs.costs(ragged)[4 - width]
    squares = 14**2 + 13**2 + 15**2
    assert SEPARATE.costs(ragged)[0] == pytest.approx(39 + squares / 2 / 3072)
    assert SHARED.costs(ragged)[0] == pytest.approx(19 + (squares - 2 * 10**2) / 2 / 3072)


RAGGED = st.lists(
    st.tuples(st.integers(1, 900), st.lists(st.integers(1, 400), min_size=1, max_size=5)), min_size=1, max_size=60
)


@unhurried
@given(RAGGED, st.integers(1, 8), st.integers(1, 16), st.integers(1, 8000))
def test_padded_batches_of_lists_count_a_row_per_response(rows, num_ranks, max_pairs, budget):
    lengths = np.array([[prompt, *sizes, *[0] * (5 - len(sizes))] for prompt, sizes in rows], dtype=np.uint32)
    batching = MicroBatching(lengths, SEPARATE, max_tokens=budget, max_pairs=max_pairs)
    batches = [batch for batches in split_all(batching, np.arange(len(rows)), num_ranks) for batch in batches]
    assert sorted(i for batch in batches for i in batch) == list(range(len(rows)))
    for batch in batches:
        width = max(prompt + max(sizes) for prompt, sizes in (rows[i] for i in batch))
        num_rows = sum(len(rows[i][1]) for i in batch)
        assert len(batch) == 1 or (len(batch) <= max_pairs and num_rows * width <= budget)


def drawn_lengths(num_pairs: int) -> np.ndarray:
    """Draw lengths with the median, spread and maximum of HH-RLHF's at a token per four characters."""
    lengths = np.random.default_rng(0).lognormal([4.4, 3.7, 3.4], [1.1, 0.95, 0.95], (num_pairs, 3))
    return lengths.clip(1, [1000, 900, 430]).astype(np.uint32)


def real_lengths(num_pairs: int, shared_data: Path) -> np.ndarray:
    rows = []
    with gzip.open(shared_data / "hh-rlhf-test" / "helpful-base.test.jsonl.gz", "rt") as lines:
        for line in lines:
            pair = json.loads(line)
            start = pair["chosen"].rfind("\n\nAssistant:") + len("\n\nAssistant:")
            rows.append(
                (start // 4, len(pair["chosen"]) // 4 + 1 - start // 4, max(1, len(pair["rejected"]) - start) // 4 + 1)
            )
    return as_lengths(rows)[np.random.default_rng(0).integers(0, len(rows), num_pairs)]


@pytest.mark.parametrize(
    ("num_ranks", "source"),
    [
        *((num_ranks, "drawn") for num_ranks in (8, 64, 1024)),
        pytest.param(1024, "real", marks=pytest.mark.real),
    ],
)
def test_cost_is_balanced_over_ranks(num_ranks, source, request):
    """128 pairs per rank: the highest load is within 5 % of the mean, and 6 to 25 % above it without balancing."""
    num_pairs = 128 * num_ranks
    if source == "real":
        lengths = real_lengths(num_pairs, request.getfixturevalue("shared_data"))
    else:
        lengths = drawn_lengths(num_pairs)
    costs = SHARED.costs(lengths)
    started = time.process_time()
    ranks = assign_ranks(costs, num_ranks)
    assert time.process_time() - started < 0.1  # 3 ms measured
    loads = np.bincount(ranks, weights=costs, minlength=num_ranks)
    assert loads.max() / loads.mean() <= 1.05
    assert np.bincount(ranks).tolist() == [128] * num_ranks


@pytest.mark.slow
@pytest.mark.parametrize("num_responses", [2, 7])
def test_splitting_a_step_of_a_hundred_million_pairs_takes_milliseconds(tmp_path, num_responses):
    """A sparse, memory-mapped lengths index of 1.2 or 3.2 GB; a step of 1,024 ranks with 128 examples each."""
    num_pairs = 100_000_000
    with (tmp_path / "lengths.bin").open("wb") as file:
        file.truncate(num_pairs * (1 + num_responses) * 4)
    started = time.process_time()
    lengths = np.memmap(tmp_path / "lengths.bin", dtype="<u4", mode="r+", shape=(num_pairs, 1 + num_responses))
    plan = make_plan(num_pairs, seed=1, pairs_per_step=131_072, max_steps=None, num_epochs=2)
    ids = plan.pair_ids(1000)
    draw = np.random.default_rng(0)
    values = draw.integers(1, 500, (len(ids), 1 + num_responses))
    # lists have 2 to 7 responses
    values[:, 1:][np.arange(num_responses) >= draw.integers(2, num_responses + 1, (len(ids), 1))] = 0
    lengths[ids] = values
    assert time.process_time() - started < 20
    times = []
    for _ in range(5):
        started = time.process_time()
        batches = MicroBatching(lengths, SHARED, max_tokens=4096).split(plan.pair_ids(1000), rank=77, num_ranks=1024)
        times.append(time.process_time() - started)
    assert sum(map(len, batches)) == 128
    print(f"{min(times) * 1e3:.0f} ms per step")
    assert min(times) < 0.1, times  # 16 to 29 ms measured


@pytest.mark.parametrize(
    ("size", "seed", "epoch", "first"),
    [
        (10, 0, 0, [4, 5, 2, 9, 6, 7, 3, 0]),
        (10, 0, 1, [4, 8, 2, 1, 9, 5, 3, 6]),
        (1000, 42, 3, [203, 198, 588, 640, 620, 651, 676, 458]),
        (100_000, 7, 1, [67861, 71030, 96740, 93830, 55051, 44265, 28541, 89117]),
        (3_000_000, 7, 0, [2702942, 2160092, 2444825, 370416, 807042, 2858822, 264135, 1847516]),
    ],
)
def test_the_order_of_pairs_is_that_of_earlier_versions(size, seed, epoch, first):
    """Otherwise a resumed run would see some pairs twice and others never."""
    assert permuted(np.arange(8, dtype=np.uint64), size, seed, epoch).tolist() == first


TOKENS = np.random.default_rng(0).integers(1, 400, 1000)


@pytest.mark.parametrize(
    "blocks",
    [
        Blocks.by_pairs(1000, 8),
        Blocks.by_pairs(1000, 7),
        Blocks.by_tokens(len(TOKENS), TOKENS.__getitem__, 4096),
        Blocks.by_tokens(len(TOKENS), TOKENS.__getitem__, 10),
    ],
)
def test_every_pair_is_in_one_block(blocks):
    assert (blocks.edges[0], blocks.edges[-1]) == (0, 1000)
    assert (np.diff(blocks.edges) > 0).all()


def edges_at_once(tokens: np.ndarray, budget: int) -> list[int]:
    """The definition, which has the tokens of all pairs in memory: existing caches were scored in these blocks."""
    ends = np.cumsum(tokens)
    total = int(ends[-1]) if len(ends) else 0
    num_blocks = max(1, -(-total // budget))
    cuts = np.searchsorted(ends, np.arange(1, num_blocks) * (total / num_blocks)) + 1
    return np.unique(np.concatenate([[0], cuts, [len(tokens)]])).tolist()


def halved_at_once(sizes: np.ndarray, max_pairs: int, budget: int) -> list[int]:
    """The definition of blocks of padded rows, of a store in which each pair has two sequences of one length."""
    edges = [*range(0, len(sizes), max_pairs), len(sizes)]
    while too_large := [
        (start, stop)
        for start, stop in itertools.pairwise(edges)
        if stop - start > 1 and 2 * (stop - start) * sizes[start:stop].max() > budget
    ]:
        edges = sorted([*edges, *(start + (stop - start) // 2 for start, stop in too_large)])
    return edges


@pytest.mark.parametrize("rows_per_chunk", [1, 7, 64, 1 << 18])
def test_blocks_do_not_depend_on_how_many_rows_are_in_memory(monkeypatch, rows_per_chunk):
    monkeypatch.setattr(batches, "_ROWS_PER_CHUNK", rows_per_chunk)
    draw = np.random.default_rng(rows_per_chunk)
    for num_pairs in (0, 1, 6, 7, 8, 300):
        for budget in (1, 50, 999, 4096, 10**6):
            tokens = draw.integers(1, 400, num_pairs) * draw.choice([1, 1, 1, 30], num_pairs)
            blocks = Blocks.by_tokens(num_pairs, tokens.__getitem__, budget)
            assert blocks.edges.tolist() == edges_at_once(tokens, budget)
            lengths = np.stack([tokens, tokens, tokens], axis=1).astype(np.uint32)
            padded = ScoringBatching(budget, max_pairs=8).blocks(lengths)
            assert padded.edges.tolist() == halved_at_once(2 * tokens, 8, budget)
            both = Blocks.concatenated([blocks, Blocks.by_pairs(0, 3), Blocks.by_pairs(10, 3), blocks])
            rest = [num_pairs + edge for edge in (3, 6, 9, 10)]
            again = [num_pairs + 10 + edge for edge in edges_at_once(tokens, budget)[1:] if num_pairs]
            assert both.edges.tolist() == [*edges_at_once(tokens, budget)[: None if num_pairs else 1], *rest, *again]


def test_blocks_by_tokens_differ_by_less_than_a_pair():
    blocks = Blocks.by_tokens(len(TOKENS), TOKENS.__getitem__, 4096)
    sums = np.add.reduceat(TOKENS, blocks.edges[:-1])
    assert len(sums) == -(-TOKENS.sum() // 4096)
    mean = TOKENS.sum() / len(sums)
    assert np.abs(sums - mean).max() <= 400
    assert sums.min() > 3000


def test_a_pair_above_the_budget_is_a_block_and_an_empty_store_has_none():
    for tokens, edges in (([5000] * 3, [0, 1, 2, 3]), ([], [0]), ([10, 10], [0, 2])):
        counted = np.array(tokens, dtype=np.int64)
        assert Blocks.by_tokens(len(tokens), counted.__getitem__, 4096).edges.tolist() == edges


SCORED_LENGTHS = np.random.default_rng(1).integers(1, 200, (1000, 3)).astype(np.uint32)
PACKED = CostModel(attention_per_key=0, shares_prompt=True)


@pytest.mark.parametrize("max_pairs", [None, 1, 7, 64])
@pytest.mark.parametrize("costs", [PACKED, None])
def test_a_scored_batch_keeps_to_the_token_budget_and_the_number_of_pairs(max_pairs, costs):
    edges = ScoringBatching(max_tokens=600, max_pairs=max_pairs, costs=costs).blocks(SCORED_LENGTHS).edges

    assert (edges[0], edges[-1]) == (0, 1000)
    for start, stop in itertools.pairwise(edges.tolist()):
        part = SCORED_LENGTHS[start:stop]
        widths = part[:, 0] + part[:, 1:].max(axis=1)
        tokens = PACKED.tokens(part).sum() if costs else 2 * len(part) * widths.max()
        # blocks by tokens alone are about equal, and may end with a pair above the budget
        slack = PACKED.tokens(part).max() if costs and max_pairs is None else 0
        assert len(part) == 1 or tokens <= 600 + slack
        assert len(part) <= (max_pairs or 1000)


def test_a_budget_that_nothing_exceeds_leaves_the_numbers_of_pairs():
    roomy = ScoringBatching(max_tokens=10**6, max_pairs=8)
    assert roomy.blocks(SCORED_LENGTHS).edges.tolist() == Blocks.by_pairs(1000, 8).edges.tolist()
    assert roomy.blocks(SCORED_LENGTHS[:0]).edges.tolist() == [0]
