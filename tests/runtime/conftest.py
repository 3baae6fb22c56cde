"""Fixtures of the runtime tests: small models and pairs, and a reference cluster."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.small_run_fixtures import base

__all__ = ["base", "reference_cluster"]


@pytest.fixture(scope="module")
def reference_cluster(ray_here) -> Iterator[Any]:
    """One reference worker that serves all runs of a module."""
    from thresher.runtime.ray.cluster import Cluster, ResourceManager
    from thresher.runtime.ray.placement import RoleDemand
    from thresher.runtime.ray.workers import ReferenceWorker

    resources = ResourceManager([RoleDemand("reference", (), 1)], None, concurrent=True)
    cluster = Cluster("reference", ReferenceWorker, resources)
    yield cluster
    cluster.close()
    resources.close()
