"""The devices of spare workers, on a Ray cluster with GPUs in its books."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.support.ray_fixtures import ray_node

pytestmark = pytest.mark.distributed


@pytest.fixture
def two_gpus(forked_workers) -> Iterator[str]:
    """The address of a node with two GPUs in Ray's books."""
    with ray_node(num_cpus=2, num_gpus=2, **forked_workers) as address:
        yield address


def test_a_spare_sees_the_gpu_of_its_worker_without_reserving_it_or_starting_cuda(two_gpus):
    """It imports its code before the GPU is free; the worker that it becomes must not see another one."""
    import ray

    from thresher.runtime.ray.cluster import Cluster, wait_for
    from thresher.runtime.ray.placement import RoleDemand
    from thresher.runtime.ray.resources import ResourceManager
    from thresher.runtime.ray.session import ray_session
    from thresher.runtime.ray.starter import WorkerConfig
    from thresher.runtime.ray.workers import ActorWorker

    class DeviceWorker(ActorWorker):
        """A worker that returns its visible devices, and whether torch has touched one."""

        def devices(self) -> tuple[str | None, bool]:
            import torch

            return os.environ.get("CUDA_VISIBLE_DEVICES"), torch.cuda.is_initialized()

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


def test_a_worker_uses_its_own_gpu_on_a_cluster_whose_workers_see_all(two_gpus, tmp_path):
    """Clusters for vLLM set this variable; without more, all workers of a node would use its first GPU."""
    from thresher.runtime.ray.cluster import Cluster
    from thresher.runtime.ray.placement import RoleDemand
    from thresher.runtime.ray.resources import ResourceManager
    from thresher.runtime.ray.session import ray_session
    from thresher.runtime.ray.starter import WorkerConfig
    from thresher.runtime.ray.workers import ActorWorker

    with ray_session(two_gpus):
        resources = ResourceManager([RoleDemand("actor_train", (0, 1), 2)], None, concurrent=True)
        environment = {"THRESHER_DEVICE": "cpu", "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
        cluster = Cluster("actor_train", ActorWorker, resources, WorkerConfig("actor_train", environment))
        processes = cluster.call("claim_device", "actor_train", tmp_path, True)
        assert sorted(process.visible_devices for process in processes) == ["0", "1"]
        cluster.close()
        resources.close()
