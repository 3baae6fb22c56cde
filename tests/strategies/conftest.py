"""Ranks that serve all tests of a session."""

from __future__ import annotations

import pytest
from rank_pool import RankPool


@pytest.fixture(scope="session")
def two_ranks():
    pool = RankPool(2)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def four_ranks():
    pool = RankPool(4)
    yield pool
    pool.close()
