"""Fixtures of the runtime tests: small models and pairs, and a reference cluster."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.small_run_fixtures import base
from thresher.config.roles import ReferenceConfig

__all__ = ["base", "reference_cluster"]


@pytest.fixture(scope="module")
def reference_cluster(ray_here) -> Iterator[Any]:
    """One reference worker that serves all runs of a module."""
    from thresher.runtime.ray.cluster import Cluster, ResourceManager
    from thresher.runtime.ray.workers import ReferenceWorker

    resources = ResourceManager({"reference": ReferenceConfig(num_workers=1)}, None, concurrent=True)
    cluster = Cluster("reference", ReferenceWorker, resources)
    yield cluster
    cluster.close()
    resources.close()
