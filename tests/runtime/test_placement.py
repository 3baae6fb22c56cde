"""Placement of workers on nodes and devices, as a pure function without Ray."""

from __future__ import annotations

import pytest

from thresher.config import parse_config
from thresher.config.roles import PolicyConfig, ReferenceConfig, RoleConfig
from thresher.errors import UserError
from thresher.runtime.ray.placement import Node, bundles_of, note_idle_devices, place_roles

GPU_NODES = [Node(f"node{i}", f"10.0.0.{i}", 8.0, 4) for i in range(2)]


def policy(*devices: int, num_workers: int | None = None) -> dict[str, RoleConfig]:
    return {"actor_train": PolicyConfig(device_mapping=list(devices) or None, num_workers=num_workers)}


def reference(*devices: int, num_workers: int | None = None) -> dict[str, RoleConfig]:
    return {"reference": ReferenceConfig(device_mapping=list(devices) or None, num_workers=num_workers)}


def test_a_device_id_determines_the_node():
    placements = place_roles(GPU_NODES, policy(0, 3, 4, 7), None, concurrent=True)["actor_train"]
    assert [worker.node.node_id for worker in placements] == ["node0", "node0", "node1", "node1"]
    counted = place_roles(GPU_NODES, policy(0, 1, 2, 3), 2, concurrent=True)["actor_train"]
    assert [worker.node.node_id for worker in counted] == ["node0", "node0", "node1", "node1"]
    assert [worker.num_gpus for worker in placements] == [1.0] * 4


def test_roles_on_cpus_are_named_if_gpus_are_free():
    on_cpus = policy(num_workers=8)
    assert note_idle_devices(on_cpus | reference(0), 3) == [
        "actor_train computes on CPUs, and 3 GPUs of the cluster are free: actor_train.num_workers is a number of CPU "
        "workers; to use GPUs, replace it by actor_train.device_mapping=list(range(0,8))"
    ]
    assert note_idle_devices(on_cpus, 0) == []


def test_roles_on_the_same_devices_share_bundles_and_halve_the_device():
    placements = place_roles(GPU_NODES, policy(0, 1) | reference(0, 1), None, concurrent=True)
    assert [worker.num_gpus for group in placements.values() for worker in group] == [0.5] * 4
    assert [(worker.owner, worker.bundle) for worker in placements["reference"]] == [
        ("actor_train", 0),
        ("actor_train", 1),
    ]
    assert [amounts for _, amounts in bundles_of("actor_train", placements)] == [{"CPU": 2.0, "GPU": 1.0}] * 2
    assert bundles_of("reference", placements) == []


def test_roles_on_different_devices_have_separate_bundles():
    placements = place_roles(GPU_NODES, policy(0, 1, 2) | reference(2, 5), None, concurrent=True)
    assert [(worker.owner, worker.bundle) for worker in placements["reference"]] == [
        ("actor_train", 2),
        ("reference", 0),
    ]
    assert [worker.num_gpus for worker in placements["actor_train"]] == [1.0, 1.0, 0.5]
    assert [(node.node_id, amounts) for node, amounts in bundles_of("reference", placements)] == [
        ("node1", {"CPU": 1.0, "GPU": 1.0})
    ]


def test_cpu_workers_are_placed_by_free_cores_and_share_scarce_ones():
    nodes = [Node("small", "10.0.0.1", 2.0, 0), Node("large", "10.0.0.2", 6.0, 0)]
    placements = place_roles(nodes, policy(num_workers=4), None, concurrent=True)["actor_train"]
    assert [worker.node.node_id for worker in placements] == ["small", "large", "large", "large"]
    assert [(worker.num_cpus, worker.threads) for worker in placements] == [(1.0, 2)] * 4

    roles = policy(num_workers=4) | reference(num_workers=2)
    placements = place_roles(nodes[:1], roles, None, concurrent=False)
    assert [(worker.num_cpus, worker.threads) for group in placements.values() for worker in group] == [(0.33, 1)] * 6
    assert sum(amounts["CPU"] for role in placements for _, amounts in bundles_of(role, placements)) <= 2.0


def test_roles_that_take_turns_use_all_cores_of_a_node():
    nodes = [Node("node", "10.0.0.1", 8.0, 0)]
    roles = policy(num_workers=2) | reference(num_workers=2)
    threads = {
        concurrent: [
            worker.threads
            for group in place_roles(nodes, roles, None, concurrent=concurrent).values()
            for worker in group
        ]
        for concurrent in (True, False)
    }
    assert threads == {True: [2] * 4, False: [4] * 4}


@pytest.mark.parametrize(
    ("nodes", "role", "per_node", "message"),
    [
        (
            GPU_NODES,
            policy(*range(16)),
            None,
            "actor_train.device_mapping requests 16 devices, up to device 15, but the cluster has 2 nodes with 4 GPUs "
            "and 8 CPUs (devices 0 to 7); use available devices, add nodes, or remove device_mapping and set "
            "num_workers to train on CPUs",
        ),
        (
            GPU_NODES,
            reference(2),
            8,
            "reference.device_mapping requests 1 device, up to device 2, but the cluster has 2 nodes with 4 GPUs and 8 "
            "CPUs (no devices with num_gpus_per_node 8); use available devices, add nodes, or remove device_mapping "
            "and set num_workers to train on CPUs",
        ),
        (
            [Node("a", "10.0.0.1", 8.0, 0)],
            policy(0),
            None,
            "actor_train.device_mapping requests 1 device, up to device 0, but the cluster has 1 node with 0 GPUs and "
            "8 CPUs (no devices); use available devices, add nodes, or remove device_mapping and set num_workers to "
            "train on CPUs",
        ),
        (
            [Node("a", "10.0.0.1", 8.0, 2), Node("b", "10.0.0.2", 8.0, 4)],
            policy(0),
            None,
            "actor_train.device_mapping needs the same number of GPUs on every node, but the cluster has 1 node with 2 "
            "GPUs and 8 CPUs and 1 node with 4 GPUs and 8 CPUs; set num_gpus_per_node to the number to use per node",
        ),
        (
            [Node("a", "10.0.0.1", 0.0, 2)],
            policy(num_workers=2),
            None,
            "actor_train requests CPU workers, but the cluster has 1 node with 2 GPUs and 0 CPUs; add nodes with CPUs",
        ),
    ],
)
def test_a_request_that_exceeds_the_cluster_is_rejected(nodes, role, per_node, message):
    with pytest.raises(UserError) as caught:
        place_roles(nodes, role, per_node, concurrent=True)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("values", "uses_ray"),
    [
        ({}, False),
        ({"runtime": "ray"}, True),
        ({"actor_train": {"num_workers": 1}}, False),
        ({"actor_train": {"num_workers": 2}}, True),
        ({"reference": {"device_mapping": [0, 1]}}, True),
        ({"actor_train": {"device_mapping": [3]}}, False),
        ({"ray_address": "10.0.0.1:6379"}, True),
    ],
)
def test_auto_uses_ray_for_several_processes_or_with_a_cluster_address(values, uses_ray):
    assert parse_config(values).uses_ray is uses_ray


def test_the_global_batch_size_does_not_depend_on_the_number_of_ranks():
    def size(workers: int, **training: int) -> int:
        return parse_config({"actor_train": {"num_workers": workers, "training_args": training}}).pairs_per_step

    assert [size(workers, global_batch_size=24) for workers in (1, 2, 4)] == [24] * 3
    per_worker = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3}
    assert [size(workers, **per_worker) for workers in (1, 2, 4)] == [6, 12, 24]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"actor_train": {"device_mapping": [0], "num_workers": 2}},
            "num_workers has no effect with device_mapping, which has one worker per device; keep one",
        ),
        (
            {"runtime": "local", "reference": {"num_workers": 3}},
            "runtime: local is one process, but reference.num_workers needs 3; use runtime: ray",
        ),
        (
            {"runtime": "local", "ray_address": "auto"},
            "ray_address has no effect with runtime: local; use runtime: ray",
        ),
        (
            {"actor_train": {"training_args": {"global_batch_size": 8, "gradient_accumulation_steps": 2}}},
            "gradient_accumulation_steps has no effect with global_batch_size; keep one",
        ),
    ],
)
def test_contradictory_runtime_settings_are_rejected(values, message):
    with pytest.raises(UserError) as caught:
        parse_config(values)
    assert message in str(caught.value)
