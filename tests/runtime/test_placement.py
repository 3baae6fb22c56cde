"""Which node and share of a device a worker gets, as a pure function: no Ray is started here."""

from __future__ import annotations

import pytest

from thresher.config import parse_config
from thresher.errors import UserError
from thresher.runtime.ray.placement import Node, RoleDemand, bundles_of, place_roles

GPU_NODES = [Node(f"node{i}", f"10.0.0.{i}", 8.0, 4) for i in range(2)]


def policy(*devices: int) -> RoleDemand:
    return RoleDemand("actor_train", devices, len(devices))


def reference(*devices: int) -> RoleDemand:
    return RoleDemand("reference", devices, len(devices))


def test_a_device_id_names_its_node():
    places = place_roles(GPU_NODES, [policy(0, 3, 4, 7)], None, at_once=True)["actor_train"]
    assert [place.node.node_id for place in places] == ["node0", "node0", "node1", "node1"]
    counted = place_roles(GPU_NODES, [policy(0, 1, 2, 3)], 2, at_once=True)["actor_train"]
    assert [place.node.node_id for place in counted] == ["node0", "node0", "node1", "node1"]
    assert [place.num_gpus for place in places] == [1.0] * 4


def test_roles_on_the_same_devices_share_bundles_and_halve_the_device():
    places = place_roles(GPU_NODES, [policy(0, 1), reference(0, 1)], None, at_once=True)
    assert [place.num_gpus for group in places.values() for place in group] == [0.5] * 4
    assert [(place.owner, place.bundle) for place in places["reference"]] == [("actor_train", 0), ("actor_train", 1)]
    assert [amounts for _, amounts in bundles_of("actor_train", places)] == [{"CPU": 2.0, "GPU": 1.0}] * 2
    assert bundles_of("reference", places) == []


def test_roles_on_other_devices_have_bundles_of_their_own():
    places = place_roles(GPU_NODES, [policy(0, 1, 2), reference(2, 5)], None, at_once=True)
    assert [(place.owner, place.bundle) for place in places["reference"]] == [("actor_train", 2), ("reference", 0)]
    assert [place.num_gpus for place in places["actor_train"]] == [1.0, 1.0, 0.5]
    assert [(node.node_id, amounts) for node, amounts in bundles_of("reference", places)] == [
        ("node1", {"CPU": 1.0, "GPU": 1.0})
    ]


def test_cpu_workers_go_where_the_cores_are_and_share_them_where_they_are_few():
    nodes = [Node("small", "10.0.0.1", 2.0, 0), Node("large", "10.0.0.2", 6.0, 0)]
    roles = [RoleDemand("actor_train", (), 4)]
    places = place_roles(nodes, roles, None, at_once=True)["actor_train"]
    assert [place.node.node_id for place in places] == ["small", "large", "large", "large"]
    assert [(place.num_cpus, place.threads) for place in places] == [(1.0, 2)] * 4

    roles = [RoleDemand("actor_train", (), 4), RoleDemand("reference", (), 2)]
    places = place_roles(nodes[:1], roles, None, at_once=False)
    assert [(place.num_cpus, place.threads) for group in places.values() for place in group] == [(0.33, 1)] * 6
    assert sum(amounts["CPU"] for role in places for _, amounts in bundles_of(role, places)) <= 2.0


def test_roles_that_take_turns_compute_with_all_cores_of_a_node():
    nodes = [Node("node", "10.0.0.1", 8.0, 0)]
    roles = [RoleDemand("actor_train", (), 2), RoleDemand("reference", (), 2)]
    threads = {
        at_once: [
            place.threads for group in place_roles(nodes, roles, None, at_once=at_once).values() for place in group
        ]
        for at_once in (True, False)
    }
    assert threads == {True: [2] * 4, False: [4] * 4}


@pytest.mark.parametrize(
    ("nodes", "role", "per_node", "message"),
    [
        (
            GPU_NODES,
            policy(*range(16)),
            None,
            "actor_train.device_mapping asks for 16 devices up to device 15, and the cluster has 2 nodes with 4 GPUs "
            "and 8 CPUs: it has devices 0 to 7; name devices that are there, add nodes, or leave device_mapping out "
            "and set num_workers to train on CPUs",
        ),
        (
            GPU_NODES,
            reference(2),
            8,
            "reference.device_mapping asks for 1 devices up to device 2, and the cluster has 2 nodes with 4 GPUs and 8 "
            "CPUs, 8 counted on each: it has no device; name devices that are there, add nodes, or leave "
            "device_mapping out and set num_workers to train on CPUs",
        ),
        (
            [Node("a", "10.0.0.1", 8.0, 0)],
            policy(0),
            None,
            "actor_train.device_mapping asks for 1 devices up to device 0, and the cluster has 1 node with 0 GPUs and "
            "8 CPUs: it has no device; name devices that are there, add nodes, or leave device_mapping out and set "
            "num_workers to train on CPUs",
        ),
        (
            [Node("a", "10.0.0.1", 8.0, 2), Node("b", "10.0.0.2", 8.0, 4)],
            policy(0),
            None,
            "actor_train.device_mapping counts devices node by node, and the cluster has 1 node with 2 GPUs and 8 CPUs "
            "and 1 node with 4 GPUs and 8 CPUs; set num_gpus_per_node to the number that each of them gives",
        ),
        (
            [Node("a", "10.0.0.1", 0.0, 2)],
            RoleDemand("actor_train", (), 2),
            None,
            "actor_train asks for CPU workers, and the cluster has 1 node with 2 GPUs and 0 CPUs; add nodes with CPUs",
        ),
    ],
)
def test_a_wish_that_the_cluster_cannot_hold_is_refused_in_one_message(nodes, role, per_node, message):
    with pytest.raises(UserError) as caught:
        place_roles(nodes, [role], per_node, at_once=True)
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
def test_auto_takes_ray_where_a_role_has_several_processes_or_a_cluster_is_named(values, uses_ray):
    assert parse_config(values).uses_ray is uses_ray


def test_a_global_batch_is_the_steps_size_whatever_the_number_of_ranks():
    def size(workers: int, **training: int) -> int:
        return parse_config({"actor_train": {"num_workers": workers, "training_args": training}}).pairs_per_step

    assert [size(workers, global_batch_size=24) for workers in (1, 2, 4)] == [24] * 3
    each = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3}
    assert [size(workers, **each) for workers in (1, 2, 4)] == [6, 12, 24]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"actor_train": {"device_mapping": [0], "num_workers": 2}},
            "num_workers has no effect with device_mapping, which has one worker per device; keep one",
        ),
        (
            {"runtime": "local", "reference": {"num_workers": 3}},
            "runtime: local is one process, but reference.num_workers asks for 3; use runtime: ray",
        ),
        (
            {"runtime": "local", "ray_address": "auto"},
            "ray_address has no effect with runtime: local; use runtime: ray",
        ),
        ({"num_gpus_per_node": 8}, "num_gpus_per_node has no effect without a device_mapping; remove it"),
        (
            {"actor_train": {"training_args": {"global_batch_size": 8, "gradient_accumulation_steps": 2}}},
            "gradient_accumulation_steps has no effect with global_batch_size; keep one",
        ),
    ],
)
def test_settings_of_the_runtime_that_contradict_each_other_are_refused(values, message):
    with pytest.raises(UserError) as caught:
        parse_config(values)
    assert message in str(caught.value)
