"""Two Ray nodes on this machine, for runs whose workers must reach each other across nodes."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

NUM_NODES = 2
RAY_CONFIG = {
    # a lost node is noticed after seconds, but not for a busy machine
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 10_000,
    "health_check_failure_threshold": 5,
    # as in Ray that a run starts: Ray lowers the priority of its workers by default
    "worker_niceness": 0,
}


@dataclass
class Nodes:
    """Nodes with one core each, and a head node without cores, to which drivers connect."""

    cluster: Any

    @property
    def address(self) -> str:
        return str(self.cluster.address)

    def lose_one(self, draw: random.Random) -> None:
        """Kill a raylet, and let another node join."""
        node = draw.choice(sorted(self.cluster.worker_nodes, key=lambda node: str(node.unique_id)))
        (raylet,) = (each.process.pid for each in node.all_processes["raylet"])
        os.kill(raylet, signal.SIGKILL)
        self.cluster.remove_node(node, allow_graceful=False)
        self.cluster.add_node(num_cpus=1)


@contextmanager
def two_nodes(environment: dict[str, str]) -> Iterator[Nodes]:
    """Start the nodes with additional environment variables, which their workers inherit."""
    from thresher.runtime.ray.environment import set_environment

    set_environment("a cluster")  # before Ray is imported: drivers require a token
    from ray.cluster_utils import Cluster

    from thresher.runtime.ray.session import protect_token

    protect_token()
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    try:
        head = {"num_cpus": 0, "include_dashboard": False, "_system_config": RAY_CONFIG}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        try:
            for _ in range(NUM_NODES):
                cluster.add_node(num_cpus=1)
            yield Nodes(cluster)
        finally:
            cluster.shutdown()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
