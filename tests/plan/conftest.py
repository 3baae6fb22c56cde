"""Two and four gloo ranks and a small model, shared by the tests of a file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.support.strategies.parity import save_model
from tests.support.strategies.rank_pool import RankPool


@pytest.fixture(scope="module")
def ranks() -> Iterator[Callable[[int], RankPool]]:
    """Pools by number of ranks, started on first use."""
    pools: dict[int, RankPool] = {}

    def find(size: int) -> RankPool:
        if size not in pools or not pools[size].is_alive:
            pools[size] = RankPool(size)
        return pools[size]

    yield find
    for pool in pools.values():
        pool.close()


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory) -> Callable[[str], Path]:
    return cache(lambda family: save_model(tmp_path_factory.mktemp(family) / "policy", family, seed=0))
