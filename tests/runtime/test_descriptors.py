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
    assert raise_descriptor_limit(num_ranks=8) is None
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)


def test_a_hard_limit_below_the_sockets_of_the_world_is_reported(hard):
    warning = raise_descriptor_limit(num_ranks=hard)
    assert warning is not None
    assert f"allows {hard} open files per process, and {hard} ranks may need {3 * hard + 256}; raise" in warning
