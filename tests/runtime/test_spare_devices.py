"""The devices of spare workers, on a Ray cluster with GPUs in its books."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

pytestmark = pytest.mark.distributed


@pytest.fixture
def two_gpus() -> Iterator[str]:
    """The address of a node with two GPUs in Ray's books."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "num_gpus": 2, "include_dashboard": False})
    yield cluster.address
    cluster.shutdown()


def test_a_spare_sees_the_gpu_of_its_worker_without_reserving_it(two_gpus):
    """It imports torch before the GPU is free; the worker that it becomes must not see another one."""
    import ray

    from thresher.runtime.ray.cluster import Cluster, wait_for
    from thresher.runtime.ray.placement import RoleDemand
    from thresher.runtime.ray.resources import ResourceManager
    from thresher.runtime.ray.session import ray_session
    from thresher.runtime.ray.starter import WorkerConfig

    class DeviceWorker:
        """A worker that returns its visible devices, and whether torch has touched one."""

        def __init__(self, rank: int, size: int, threads: int, directory: str):
            pass

        def devices(self) -> tuple[str | None, bool]:
            import torch

            return os.environ.get("CUDA_VISIBLE_DEVICES"), torch.cuda.is_initialized()

        def heartbeat(self) -> None:
            pass

    with ray_session(two_gpus):
        resources = ResourceManager([RoleDemand("actor_train", (0, 1), 2)], None, concurrent=True)
        environment = WorkerConfig("actor_train", {"THRESHER_DEVICE": "cpu"})
        cluster = Cluster("actor_train", DeviceWorker, resources, environment)
        devices = [visible for visible, _ in cluster.call("devices")]
        assert sorted(devices) == ["0", "1"]
        spares = [cluster.starter.start_spare(rank, visible) for rank, visible in enumerate(devices)]
        found = ray.get([spare.devices.remote() for spare in spares])  # while the workers hold both GPUs
        assert found == [(visible, False) for visible in devices]
        assert ray.available_resources().get("GPU", 0.0) == 0.0
        cluster.close()
        replaced = Cluster("actor_train", DeviceWorker, resources, environment)
        assert [visible for visible, _ in wait_for(replaced.submit("devices"))] == devices  # its bundle keeps its GPU
        replaced.close()
        for spare in spares:
            ray.kill(spare)
        resources.close()


def test_importing_the_code_of_a_worker_does_not_start_cuda():
    program = "import thresher.runtime.ray.workers, torch; print(torch.cuda.is_initialized())"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=240)
    assert ended.stdout.split() == ["False"]
