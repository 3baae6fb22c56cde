"""A Ray cluster of two nodes with two simulated GPUs each: real placement, computation on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.compared_runs import merge
from tests.support.logged import logged
from tests.support.small_runs import assert_same_run
from thresher.config import parse_config
from thresher.config.roles import PolicyConfig, ReferenceConfig
from thresher.errors import UserError
from thresher.pipeline import DPOPipeline

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def address(forked_workers) -> Iterator[str]:
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 4, "num_gpus": 2, **forked_workers}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    cluster.add_node(**node)
    yield cluster.address
    cluster.shutdown()


def run(values: dict[str, Any], output: Path) -> list[str]:
    with logged() as records:
        DPOPipeline(parse_config({**values, "output_dir": str(output)})).run()
    return [record.getMessage() for record in records]


@pytest.fixture(scope="module")
def local(base, tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("local")
    run(base, output)
    return output


LAYOUTS = {
    "the reference on separate devices": {
        "actor_train": {"device_mapping": [1, 2]},
        "reference": {"device_mapping": "[0, 3]", "mode": "concurrent", "infer_batch_size": 8},
    },
    "the reference on the policy's devices": {
        "actor_train": {"device_mapping": [0, 2]},
        "reference": {"device_mapping": [0, 2]},
        "num_gpus_per_node": 2,
    },
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_run_over_two_nodes_equals_one_process(base, local, address, tmp_path, layout):
    without_gpus = {"ray_address": address, "system_envs": {"THRESHER_DEVICE": "cpu"}}
    lines = run(merge(merge(base, layout), without_gpus), tmp_path / "out")
    assert "device      2 x cpu on 2 nodes" in lines
    assert_same_run(tmp_path / "out", local)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has GPUs")
def test_a_worker_whose_gpu_torch_cannot_use_ends_the_run_and_does_not_compute_on_the_cpu(base, address, tmp_path):
    values = merge(merge(base, LAYOUTS["the reference on the policy's devices"]), {"ray_address": address})
    with pytest.raises(UserError, match=r"^actor_train worker [01] of 2 on \S+ needs GPU 0, but .*; check nvidia-smi"):
        run(values, tmp_path / "out")
    assert not (tmp_path / "out" / "checkpoints").exists()


@pytest.fixture
def connected(address) -> Iterator[None]:
    from thresher.runtime.ray.session import ray_session

    with ray_session(address):
        yield


def test_workers_run_on_the_nodes_of_their_device_ids(connected):
    """Two roles share devices 0 and 3; device 1 belongs to the policy alone."""
    import ray

    from thresher.runtime.ray.cluster import Cluster, ResourceManager, alive_nodes

    class LocationWorker:
        """A worker that returns its node and its visible devices."""

        def __init__(self, rank: int, size: int, threads: int, directory: str):
            pass

        def where(self) -> tuple[str, list[str]]:
            context = ray.get_runtime_context()
            return context.get_node_id(), context.get_accelerator_ids()["GPU"]

    roles = {"actor_train": PolicyConfig(device_mapping=[0, 1, 3]), "reference": ReferenceConfig(device_mapping=[3, 0])}
    resources = ResourceManager(roles, None, concurrent=True)
    clusters = {name: Cluster(name, LocationWorker, resources) for name in ("actor_train", "reference")}
    policy, reference = (cluster.call("where") for cluster in clusters.values())
    first, second = (node.node_id for node in alive_nodes())
    assert [node for node, _ in policy] == [first, first, second]
    assert reference == [policy[2], policy[0]]  # the same node and the same device
    assert policy[0][1] != policy[1][1]
    for cluster in clusters.values():
        cluster.close()
    resources.close()


def test_missing_devices_are_rejected_before_anything_but_the_log_is_written(base, address, tmp_path):
    values = merge(base, {"actor_train": {"device_mapping": "list(range(0,8))"}, "ray_address": address})
    with pytest.raises(UserError) as caught:
        run(values, tmp_path / "out")
    assert str(caught.value) == (
        "actor_train.device_mapping requests 8 devices, up to device 7, but the cluster has 2 nodes with 2 GPUs and 4 "
        "CPUs (devices 0 to 3); use available devices, add nodes, or remove device_mapping and set num_workers to "
        "train on CPUs"
    )
    assert [path.name for path in (tmp_path / "out").rglob("*") if path.is_file()] == ["run.log"]


def test_devices_that_other_work_uses_are_reported(connected, monkeypatch):
    from thresher.runtime.ray import cluster

    monkeypatch.setattr(cluster, "_SECONDS_TO_RESERVE", 1.0)
    holder = cluster.ResourceManager({"actor_train": PolicyConfig(device_mapping=[0])}, 1, concurrent=True)
    with pytest.raises(
        UserError, match=r"reference requests 2 GPUs .* other work uses them \(3 GPUs and .* are free\)"
    ):
        cluster.ResourceManager({"reference": ReferenceConfig(device_mapping=[0, 1])}, 2, concurrent=True)
    holder.close()


def test_an_unreachable_cluster_is_reported(base, tmp_path):
    with pytest.raises(
        UserError, match=r"cannot connect to the Ray cluster at 127\.0\.0\.1:1: .*refused; check ray_addr"
    ):
        run({**base, "ray_address": "127.0.0.1:1"}, tmp_path / "out")
