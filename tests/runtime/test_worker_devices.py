"""The devices of workers, on a Ray cluster with GPUs in its books."""

from __future__ import annotations

import os

import pytest

from tests.support.ray_fixtures import ray_node
from thresher.config.roles import PolicyConfig

pytestmark = pytest.mark.distributed


def test_a_worker_uses_its_own_gpu_on_a_cluster_whose_workers_see_all(forked_workers, tmp_path):
    """Clusters for vLLM set this variable; without more, all workers of a node would use its first GPU."""
    from thresher.runtime.ray.cluster import Cluster, ResourceManager
    from thresher.runtime.ray.session import ray_session
    from thresher.runtime.ray.workers import ActorWorker

    class DeviceWorker(ActorWorker):
        """A worker that returns its visible devices."""

        def devices(self) -> str | None:
            return os.environ.get("CUDA_VISIBLE_DEVICES")

    with ray_node(num_cpus=2, num_gpus=2, **forked_workers) as address, ray_session(address):
        resources = ResourceManager({"actor_train": PolicyConfig(device_mapping=[0, 1])}, None, concurrent=True)
        environment = {"THRESHER_DEVICE": "cpu", "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
        cluster = Cluster("actor_train", DeviceWorker, resources, environment)
        cluster.call("claim_device", "actor_train", tmp_path, True)
        assert sorted(cluster.call("devices")) == ["0", "1"]
        cluster.close()
        resources.close()
