"""Megatron-Core's process groups: the ranks that it chooses, and one group for each set of them."""

from __future__ import annotations

import pytest

from tests.support.engines.fake_world import megatron_groups_in_a_fake_world
from thresher.engines.megatron.declaration import MegatronSizes


@pytest.mark.parametrize(
    ("sizes", "num_processes", "rank", "num_groups"),
    [
        (MegatronSizes(tp=8, pp=4), 1024, 0, 9),
        (MegatronSizes(tp=8, pp=4), 1024, 300, 8),  # of a middle stage, without an embedding
        (MegatronSizes(tp=2, pp=2, cp=2, ep=2), 32, 21, 12),
    ],
    ids=str,
)
def test_megatron_has_its_own_ranks_in_one_group_for_each_set(sizes, num_processes, rank, num_groups):
    alone, shared, created = megatron_groups_in_a_fake_world(sizes, num_processes, rank)
    assert len(alone) > 15
    assert shared == alone
    assert len(created) == len({tuple(ranks) for ranks in created}) == num_groups
