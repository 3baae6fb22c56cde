"""The limit of open files of a worker."""

from __future__ import annotations

import resource

import pytest

from thresher.runtime.devices import raise_descriptor_limit


@pytest.fixture
def hard():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
    yield hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_soft_limit_becomes_the_hard_one(hard):
    assert hard > 512
    raise_descriptor_limit()
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
