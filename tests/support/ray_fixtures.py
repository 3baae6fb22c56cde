"""Ray for tests: a node that all test files of a process share, and the parts of nodes that a test starts for itself.

Tests that need other nodes, or that test how a run starts Ray, do not use `ray_here`: a run uses the session of its
process if there is one. Its connection is open during the tests of a file, and the node until the end of all tests.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.forks import WORKER_PROGRAM, fork_server, python

# processes that no test needs: the dashboard, and those that start nodes and pass logs to drivers
FEW_PROCESSES = {"include_dashboard": False, "include_log_monitor": False, "no_monitor": True}


@pytest.fixture(scope="session")
def forked_workers(python_path_of_children) -> dict[str, Any]:
    """Settings of Ray nodes whose workers are forked."""
    python()  # starts the server
    return {"setup_worker_path": WORKER_PROGRAM, **FEW_PROCESSES}


@pytest.fixture(scope="session")
def shared_node(forked_workers) -> Iterator[str]:
    """The address of a Ray node with enough logical cores for several clusters of workers."""
    with ray_node(num_cpus=8, **forked_workers) as address:
        yield address


@pytest.fixture(scope="module")
def ray_here(shared_node) -> Iterator[None]:
    """A connection to the shared node; runs use it, and its end ends all their actors."""
    with connection(shared_node):
        yield


@pytest.fixture(scope="module")
def ray_for_megatron() -> Iterator[None]:
    """A Ray session whose workers answer torch.cuda with the CPU where Megatron-Core needs it."""
    import torch

    site = Path(__file__).parent / "megatron_site"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "device_count", lambda: 1)  # the checks of a run look for a GPU in this process
        patch.setenv("PYTHONPATH", str(site), prepend=os.pathsep)
        with (
            fork_server(),
            ray_node(num_cpus=32, setup_worker_path=WORKER_PROGRAM, **FEW_PROCESSES) as address,
            connection(address),
        ):
            yield


@contextmanager
def ray_node(**settings: Any) -> Iterator[str]:
    """Start a Ray node; yield its address."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args=settings)
    try:
        yield cluster.address
    finally:
        cluster.shutdown()


@contextmanager
def connection(address: str) -> Iterator[None]:
    import ray

    ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    try:
        yield
    finally:
        ray.shutdown()
