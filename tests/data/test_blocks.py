"""Blocks of pairs that the reference scores together cover a store once and have nearly equal sizes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from thresher.data.batching.batches import Blocks, CostModel, ScoringBatching

TOKENS = np.random.default_rng(0).integers(1, 400, 1000)


@pytest.mark.parametrize(
    "blocks",
    [Blocks.by_pairs(1000, 8), Blocks.by_pairs(1000, 7), Blocks.by_tokens(TOKENS, 4096), Blocks.by_tokens(TOKENS, 10)],
)
def test_every_pair_is_in_one_block(blocks):
    every = np.arange(len(blocks.edges) - 1)
    assert blocks.pairs(every).tolist() == list(range(1000))
    assert blocks.containing(np.arange(1000)).tolist() == np.repeat(every, blocks.sizes(every)).tolist()
    chosen = every[3::5]
    assert blocks.pairs(chosen).tolist() == [
        i for block in chosen for i in range(blocks.edges[block], blocks.edges[block + 1])
    ]


def test_blocks_by_tokens_differ_by_less_than_a_pair():
    blocks = Blocks.by_tokens(TOKENS, 4096)
    sums = np.add.reduceat(TOKENS, blocks.edges[:-1])
    assert len(sums) == -(-TOKENS.sum() // 4096)
    mean = TOKENS.sum() / len(sums)
    assert np.abs(sums - mean).max() <= 400
    assert sums.min() > 3000


def test_a_pair_above_the_budget_is_a_block_and_an_empty_store_has_none():
    assert Blocks.by_tokens(np.array([5000, 5000, 5000]), 4096).edges.tolist() == [0, 1, 2, 3]
    assert Blocks.by_tokens(np.array([], dtype=np.int64), 4096).edges.tolist() == [0]
    assert Blocks.by_tokens(np.array([10, 10]), 4096).edges.tolist() == [0, 2]


LENGTHS = np.random.default_rng(1).integers(1, 200, (1000, 3)).astype(np.uint32)
PACKED = CostModel(attention_per_key=0, shares_prompt=True)


@pytest.mark.parametrize("max_pairs", [None, 1, 7, 64])
@pytest.mark.parametrize("costs", [PACKED, None])
def test_a_scored_batch_keeps_to_the_token_budget_and_the_number_of_pairs(max_pairs, costs):
    edges = ScoringBatching(max_tokens=600, max_pairs=max_pairs, costs=costs).blocks(LENGTHS).edges

    assert (edges[0], edges[-1]) == (0, 1000)
    for start, stop in itertools.pairwise(edges.tolist()):
        part = LENGTHS[start:stop]
        widths = part[:, 0] + part[:, 1:].max(axis=1)
        tokens = PACKED.tokens(part).sum() if costs else 2 * len(part) * widths.max()
        # blocks by tokens alone are about equal, and may end with a pair above the budget
        slack = PACKED.tokens(part).max() if costs and max_pairs is None else 0
        assert len(part) == 1 or tokens <= 600 + slack
        assert len(part) <= (max_pairs or 1000)


def test_a_budget_that_nothing_exceeds_leaves_the_numbers_of_pairs():
    roomy = ScoringBatching(max_tokens=10**6, max_pairs=8)
    assert roomy.blocks(LENGTHS).edges.tolist() == Blocks.by_pairs(1000, 8).edges.tolist()
    assert roomy.blocks(LENGTHS[:0]).edges.tolist() == [0]
