"""Elastic scaling: a run continues with the same steps on fewer nodes, and uses a node that joins."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.compared_runs import merge
from tests.support.logged import logged
from tests.support.small_runs import assert_same_run
from thresher.config import parse_config
from thresher.errors import RescaleRequested, ResourceError
from thresher.pipeline import DPOPipeline
from thresher.runtime.group import Runtime
from thresher.runtime.ray.placement import ElasticScaler, Node, fit_to_nodes

GPU_NODES = [Node(str(number), f"10.0.0.{number}", 8.0, 4) for number in range(4)]


def fit(role: dict[str, Any], num_nodes: int) -> tuple[int, dict[str, Any]]:
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
        (with_axes(16, dp_replicate=2), 3, (8, {"dp_replicate": 1})),  # one replica of 8 workers
        (with_axes(16, dp_replicate=2), 1, (4, {"dp_replicate": 1})),  # less than one replica: larger shards
        (with_axes(16, dp_replicate=16), 2, (8, {"dp_replicate": 8})),
        ({"num_workers": 40}, 4, (32, {})),  # one per core
        ({"num_workers": 4}, 1, (4, {})),
    ],
)
def test_the_remaining_workers_match_the_parallel_axes(role, num_nodes, expected):
    assert fit(role, num_nodes) == expected


def test_fewer_workers_than_one_data_rank_needs_are_rejected():
    with pytest.raises(ResourceError, match="room for 4 and one model replica needs 8; add nodes"):
        fit(with_axes(16, tp_size=8), 1)


def test_the_pairs_of_a_step_do_not_depend_on_the_available_workers():
    """Without global_batch_size, the configured number of workers determines the pairs per step."""
    config = parse_config(
        {"pretrain": "x", "actor_train": {"data_args": {"file_name": "x"}, **with_axes(16)}, "elastic": True}
    )
    assert config.pairs_per_step == 16 * 8
    nodes, free = GPU_NODES[:2], 0.0
    scaler = ElasticScaler(config, lambda: nodes, lambda: {"GPU": free})
    assert scaler.notes == [
        "elastic: actor_train runs with 8 of 16 workers, because the cluster has no room for more; the pairs of each "
        "step are unchanged"
    ]
    assert scaler.can_scale_up() is None
    nodes += GPU_NODES[2:3]
    assert scaler.can_scale_up() is None  # used by other work
    free = 4.0
    assert scaler.can_scale_up() == "the cluster has room for 4 more workers"


class Ranks:
    """Ranks of a policy that record the calls to them."""

    num_nodes = 1

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __len__(self) -> int:
        return 2

    def on_all(self, method: Callable[..., Any], *_: object) -> None:
        self.calls.append(method.__name__)

    def stream(self, method: Callable[..., Iterator[Any]], *_: object) -> Iterator[Any]:
        self.calls.append(method.__name__)
        return iter(())


def test_a_run_grows_only_between_a_checkpoint_and_the_next_step():
    """Later, the steps since the checkpoint would be repeated."""
    ranks, room = Ranks(), [None, "the cluster has room for 4 more workers"]
    runtime = Runtime(None, ranks)
    runtime.can_scale_up = lambda: room[0]
    runtime.save()
    list(runtime.run(2))  # no room yet
    room.reverse()
    list(runtime.run(3))  # room, but a step since the checkpoint
    runtime.save()
    with pytest.raises(RescaleRequested, match="room for 4 more workers"):
        runtime.run(4)
    assert ranks.calls == ["save", "run", "run", "save", "wait_for_saves"]


def test_a_reference_that_lost_its_devices_shares_the_remaining_ones():
    policy = {"data_args": {"file_name": "x"}, "device_mapping": "list(range(0,8))"}
    reference = {"device_mapping": "list(range(8,16))"}
    config = parse_config({"pretrain": "x", "actor_train": policy, "reference": reference, "elastic": True})
    fitted = fit_to_nodes(config, GPU_NODES[:2])
    assert (fitted.actor_train.device_mapping, fitted.reference.device_mapping) == (list(range(8)), list(range(8)))
    only_policy = fit_to_nodes(config, GPU_NODES[:2], ["actor_train"])
    assert only_policy.reference.device_mapping == list(range(8, 16))  # a role without workers is unchanged


class Callbacks:
    """A console tracker that calls a function when an attempt, or a later one, logs a step; the first attempt is 1."""

    name = "console"

    def __init__(self, at: dict[tuple[int, int], Callable[[], object]]):
        self._at = dict(at)
        self._attempt = 0

    def start(self, run: object, resume_step: int | None) -> None:  # noqa: ARG002
        self._attempt += 1

    def log(self, step: int, metrics: object) -> None:  # noqa: ARG002
        for attempt, at_step in list(self._at):
            if step == at_step and self._attempt >= attempt:
                self._at.pop((attempt, at_step))()

    def close(self, status: str) -> None:
        pass


@pytest.fixture
def cluster(forked_workers) -> Iterator[Any]:
    """A head node without cores, which notices a dead node within seconds."""
    from ray.cluster_utils import Cluster

    fast_checks = {"health_check_period_ms": 1000, "health_check_timeout_ms": 3000, "health_check_failure_threshold": 3}
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "_system_config": fast_checks, **forked_workers}
    )
    yield cluster
    cluster.shutdown()


@pytest.mark.hand  # CI has the choice of axes and pairs, and a worker that dies
@pytest.mark.distributed
def test_a_run_shrinks_when_a_node_is_lost_and_grows_when_one_joins(base, cluster, forked_workers, tmp_path):
    node = {"num_cpus": 1, **forked_workers}
    nodes = [cluster.add_node(**node) for _ in range(2)]
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
    # the configured number of workers determines the pairs per step, not the available ones
    per_worker = {"global_batch_size": None, "per_device_train_batch_size": 3}
    values = merge(values, {"actor_train": {"training_args": per_worker}})

    # workers outlive their node for a moment: wait for their end, so that the first attempt does not pass step 6
    def lose_node() -> None:
        cluster.remove_node(nodes[1], allow_graceful=False)
        time.sleep(8)

    events = Callbacks(
        {
            (1, 5): lose_node,
            (2, 8): lambda: cluster.add_node(**node),
        }
    )
    config = parse_config({**values, "output_dir": str(tmp_path / "elastic")})
    with logged() as records:
        DPOPipeline(config, console=events).run()

    lines = [record.getMessage() for record in records]
    starts = [line for line in lines if line.startswith("device ")]
    log = "\n".join(lines)
    first, shrunk, grown = starts
    assert first == "device      2 x cpu on 2 nodes", log
    assert shrunk == "device      1 x cpu on 1 node", log
    assert grown == "device      2 x cpu on 2 nodes", log
    assert "elastic: actor_train runs with 1 of 2 workers" in log
    assert "the cluster has room for 1 more worker; restarting from" in log
    # the node joined during step 8, and is used after the next checkpoint
    assert [line for line in lines if line.startswith("resuming from ")][-1].endswith("step-00000009")

    in_one_process = {"elastic": False, "ray_address": None, "runtime": "local", "actor_train": {"num_workers": None}}
    local = merge(values, in_one_process)
    local["actor_train"] = merge(local["actor_train"], {"training_args": {"global_batch_size": 6}})
    DPOPipeline(parse_config({**local, "output_dir": str(tmp_path / "local")})).run()
    assert_same_run(tmp_path / "elastic", tmp_path / "local")
