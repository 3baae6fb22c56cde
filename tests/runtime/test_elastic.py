"""A node that is lost for good, and one that joins: the same steps on the workers that there are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.compared_runs import merge
from tests.support.logged import logged
from tests.support.small_runs import assert_same_run
from thresher.config import parse_config
from thresher.errors import ResourceError
from thresher.pipeline import DPOPipeline
from thresher.runtime.ray.elastic import ElasticScaler, fit_to_nodes
from thresher.runtime.ray.placement import Node

GPU_NODES = [Node(str(number), f"10.0.0.{number}", 8.0, 4) for number in range(4)]


def shrunk(role: dict[str, Any], num_nodes: int) -> tuple[int, dict[str, Any]]:
    config = parse_config({"pretrain": "x", "actor_train": {"data_args": {"file_name": "x"}, **role}, "elastic": True})
    fitted = fit_to_nodes(config, GPU_NODES[:num_nodes]).actor_train
    return fitted.num_processes, fitted.strategy_args.strategy_config


def with_axes(count: int, **axes: int) -> dict[str, Any]:
    return {"device_mapping": f"list(range(0,{count}))", "strategy_args": {"strategy_config": axes}}


@pytest.mark.parametrize(
    ("role", "num_nodes", "expected"),
    [
        (with_axes(16), 3, (12, {})),
        (with_axes(16), 4, (16, {})),
        (with_axes(16, tp_size=4, pp_size=2), 3, (8, {"tp_size": 4, "pp_size": 2})),
        (with_axes(16, dp_replicate=4), 3, (12, {"dp_replicate": 3})),
        (with_axes(16, dp_replicate=2), 3, (8, {"dp_replicate": 1})),  # whole copies of 8
        (with_axes(16, dp_replicate=2), 1, (4, {"dp_replicate": 1})),  # less than one copy: larger shards
        (with_axes(16, dp_replicate=16), 2, (8, {"dp_replicate": 8})),
        ({"num_workers": 40}, 4, (32, {})),  # one for each core
        ({"num_workers": 4}, 1, (4, {})),
    ],
)
def test_the_workers_that_are_left_fit_the_axes(role, num_nodes, expected):
    assert shrunk(role, num_nodes) == expected


def test_less_than_one_rank_is_no_run():
    with pytest.raises(ResourceError, match="room for 4, and one copy of the model takes 8; add nodes"):
        shrunk(with_axes(16, tp_size=8), 1)


def test_the_pairs_of_a_step_do_not_follow_the_workers():
    """Without global_batch_size the configured number of workers says how many pairs a step has."""
    config = parse_config(
        {"pretrain": "x", "actor_train": {"data_args": {"file_name": "x"}, **with_axes(16)}, "elastic": True}
    )
    assert config.pairs_per_step == 16 * 8
    nodes, free = GPU_NODES[:2], 0.0
    elasticity = ElasticScaler(config, lambda: nodes, lambda: {"GPU": free})
    assert elasticity.notes == [
        "elastic: 8 of 16 workers of actor_train, as the cluster has no room for more; the steps stay the same"
    ]
    assert elasticity.can_scale_up() is None
    nodes += GPU_NODES[2:3]
    assert elasticity.can_scale_up() is None  # somebody else uses it
    free = 4.0
    assert elasticity.can_scale_up() == "the cluster has room for 4 more workers"


def test_a_reference_whose_devices_are_gone_shares_those_that_are_left():
    policy = {"data_args": {"file_name": "x"}, "device_mapping": "list(range(0,8))"}
    reference = {"device_mapping": "list(range(8,16))"}
    config = parse_config({"pretrain": "x", "actor_train": policy, "reference": reference, "elastic": True})
    fitted = fit_to_nodes(config, GPU_NODES[:2])
    assert (fitted.actor_train.device_mapping, fitted.reference.device_mapping) == (list(range(8)), list(range(8)))
    only_policy = fit_to_nodes(config, GPU_NODES[:2], ["actor_train"])
    assert only_policy.reference.device_mapping == list(range(8, 16))  # it has no workers, so nothing is fitted


class Nodes:
    """A console that takes a node away and gives one back when steps are logged for the first time."""

    name = "console"

    def __init__(self, at: dict[int, Callable[[], object]]):
        self._at = dict(at)

    def start(self, run: object, resume_step: int | None) -> None:
        pass

    def log(self, step: int, metrics: object) -> None:  # noqa: ARG002
        if step in self._at:
            self._at.pop(step)()

    def close(self, status: str) -> None:
        pass


@pytest.fixture
def cluster(ray_environment) -> Iterator[Any]:
    """A head without cores, and two nodes with one each; a dead node is noticed within seconds."""
    from ray.cluster_utils import Cluster

    soon = {"health_check_period_ms": 1000, "health_check_timeout_ms": 3000, "health_check_failure_threshold": 3}
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 0, "include_dashboard": False, "_system_config": soon},
    )
    yield cluster
    cluster.shutdown()


@pytest.mark.distributed
def test_a_lost_node_and_a_new_one(base, cluster, tmp_path):
    nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
    values = merge(
        base,
        {
            "runtime": "ray",
            "elastic": True,
            "ray_address": cluster.address,
            "track_with": ["console"],
            "max_steps": 12,
            "save_steps": 3,
            "eval_steps": 3,
            "actor_train": {"num_workers": 2},
        },
    )
    # the number of workers in the config says how many pairs a step has, however many there are
    each = {"global_batch_size": None, "per_device_train_batch_size": 3}
    values = merge(values, {"actor_train": {"training_args": each}})
    events = Nodes(
        {5: lambda: cluster.remove_node(nodes[1], allow_graceful=False), 8: lambda: cluster.add_node(num_cpus=1)}
    )
    config = parse_config({**values, "output_dir": str(tmp_path / "elastic")})
    with logged() as records:
        DPOPipeline(config, console=events).run()

    lines = [record.getMessage() for record in records]
    places = [line for line in lines if " on 1 x cpu " in line or " on 2 x cpu " in line]
    told = "\n".join(lines)
    first, alone, grown = places  # how it began, without the lost node, and with the new one
    assert "on 2 x cpu on 2 nodes" in first, told
    assert "on 1 x cpu on 1 node" in alone, told
    assert "on 2 x cpu on 2 nodes" in grown, told
    assert "elastic: 1 of 2 workers of actor_train" in told
    assert "the cluster has room for 1 more worker; restarting from" in told
    assert "step-00000009" in grown  # joined during step 8, used after the next checkpoint

    whole = merge(values, {"ray_address": None, "runtime": "local", "actor_train": {"num_workers": None}})
    whole["actor_train"] = merge(whole["actor_train"], {"training_args": {"global_batch_size": 6}})
    DPOPipeline(parse_config({**whole, "output_dir": str(tmp_path / "whole")})).run()
    assert_same_run(tmp_path / "elastic", tmp_path / "whole")
