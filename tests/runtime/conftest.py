"""Fixtures of the runtime tests: small models and pairs, a Ray session, and a reference cluster."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.small_runs import make_base


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return make_base(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def ray_here() -> Iterator[None]:
    """A local Ray session with enough logical cores for several clusters; runs reuse it."""
    import ray

    ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def reference_cluster(ray_here) -> Iterator[Any]:
    """One reference worker that serves all runs of a module."""
    from thresher.runtime.ray.cluster import Cluster, WorkerConfig
    from thresher.runtime.ray.placement import RoleDemand
    from thresher.runtime.ray.resources import ResourceManager
    from thresher.runtime.ray.workers import ReferenceWorker

    resources = ResourceManager([RoleDemand("reference", (), 1)], None, concurrent=True)
    cluster = Cluster("reference", ReferenceWorker, resources, WorkerConfig("reference", joins_process_group=False))
    yield cluster
    cluster.close()
    resources.close()
