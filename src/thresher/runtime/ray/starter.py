"""Start the processes of a role: workers in the bundles that are reserved for them, and spares that reserve nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from thresher.runtime.ray.heartbeat_monitor import CONCURRENCY_GROUPS
from thresher.runtime.ray.placement import WorkerPlacement

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
# Ray would overwrite the variable of a process without GPUs in its books, depending on its version and settings
_KEEP_VISIBLE_DEVICES = {
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


@dataclass(frozen=True)
class WorkerConfig:
    """Settings that all workers of a role share."""

    role: str
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class WorkerStarter:
    """Starts the process of a rank. groups: Ray's placement group of each role that owns bundles."""

    worker_cls: type
    config: WorkerConfig
    placements: Sequence[WorkerPlacement]
    groups: Mapping[str, Any]

    def start(self, rank: int) -> Any:
        """Start a worker in its bundle; Ray waits until a previous process in it has ended."""
        placement = self.placements[rank]
        bundle = PlacementGroupSchedulingStrategy(
            placement_group=self.groups[placement.owner], placement_group_bundle_index=placement.bundle
        )
        return self._start(rank, self.config.environment, bundle, placement.num_cpus, placement.num_gpus)

    def start_spare(self, rank: int, visible_devices: str | None) -> Any:
        """Start a process that can replace the worker of a rank, on the same node.

        The bundle of the rank stays reserved for the run, so that a spare needs no resources in Ray's books: it would
        wait for those of the running worker. visible_devices: the GPU of the bundle, as Ray gave it to the worker.
        """
        environment = dict(self.config.environment)
        if visible_devices is not None:
            environment |= {VISIBLE_DEVICES: visible_devices, **_KEEP_VISIBLE_DEVICES}
        node = NodeAffinitySchedulingStrategy(self.placements[rank].node.node_id, soft=False)
        return self._start(rank, environment, node, 0.0, 0.0)

    def _start(
        self, rank: int, environment: Mapping[str, str], strategy: object, num_cpus: float, num_gpus: float
    ) -> Any:
        remote = ray.remote(concurrency_groups=CONCURRENCY_GROUPS)(self.worker_cls)
        return remote.options(
            num_cpus=num_cpus,
            num_gpus=num_gpus,
            max_restarts=0,
            runtime_env={"env_vars": dict(environment)} if environment else None,
            scheduling_strategy=strategy,
        ).remote(rank, len(self.placements), self.placements[rank].threads, str(Path.cwd()))
