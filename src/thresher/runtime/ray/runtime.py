"""Runtime for a run on Ray: starts the clusters of the policy and the reference and connects them."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray

from thresher.builders.inputs import RunInputs
from thresher.builders.precompute import ProgressCallback
from thresher.builders.reference import frozen_weights_digest
from thresher.builders.reference_mode import reference_has_workers, reference_mode
from thresher.builders.run import logging_dir
from thresher.config import DPOConfig
from thresher.losses.objective import Objective
from thresher.plan.budget import with_token_budget
from thresher.reference.modes import ReferenceMode
from thresher.runtime import RunHandle
from thresher.runtime.group import CachedReference, GroupStarter, with_absolute_cache_dir
from thresher.runtime.ray.cluster import Call, Cluster, WorkerConfig, wait_for
from thresher.runtime.ray.elastic import ElasticScaler
from thresher.runtime.ray.heartbeat_monitor import HeartbeatMonitor
from thresher.runtime.ray.placement import RoleDemand
from thresher.runtime.ray.resources import ResourceManager, alive_nodes
from thresher.runtime.ray.session import ray_session
from thresher.runtime.ray.workers import ActorWorker, ReferenceWorker

logger = logging.getLogger(__name__)


class RayRuntime:
    """Starts the clusters of a run."""

    def __init__(
        self,
        config: DPOConfig,
        mode: ReferenceMode,
        resources: ResourceManager,
        scaler: ElasticScaler | None = None,
    ):
        self._config = with_absolute_cache_dir(config, mode)
        self._mode = mode
        self._resources = resources
        self._scaler = scaler or ElasticScaler(config, alive_nodes, ray.available_resources)
        self._monitor = HeartbeatMonitor(config.heartbeat_timeout)
        self.policy: Cluster | None = None
        self.reference: Cluster | None = None

    def start(self, inputs: RunInputs, checkpoint: Path | None, progress: ProgressCallback) -> RunHandle:
        """Load the models on all workers in parallel, connect the clusters, and restore a checkpoint, if any."""
        config, mode = self._config, self._mode
        weights = frozen_weights_digest(config, mode)
        # workers may outlive a start: a library user may start several runs on one runtime
        policy = self.policy = self.policy or self._cluster("actor_train", ActorWorker, joins_process_group=True)
        opening = self._open_logs(policy)
        inputs = with_token_budget(
            config,
            inputs,
            checkpoint,
            # without a mapping, workers have no GPU, and need not be waited for
            lambda: policy.call("smallest_gpu")[0] if config.actor_train.device_mapping else None,
        )
        loading = policy.submit("load", config, inputs)
        cached = CachedReference.look_up(config, inputs, mode, weights)
        workers: tuple[Any, ...] = ()
        if reference_has_workers(config, mode) and (cached.num_missing or mode == "concurrent"):
            reference = self.reference or self._cluster(
                "reference", ReferenceWorker, joins_process_group=not config.reference.is_replicated
            )
            self.reference = reference
            opening += self._open_logs(reference)
            loaded = wait_for([*loading, *reference.submit("load", config, inputs)])[0]
            reference.call("serve", loaded, config.actor_train.num_data_ranks)
            workers = tuple(reference.workers)
        loaded = wait_for(loading)[0]
        for warning in filter(None, dict.fromkeys(wait_for(opening))):
            logger.warning("%s", warning)
        starter = GroupStarter(
            config,
            inputs,
            policy,
            loaded,
            cached,
            progress,
            scorers=self.reference,
            release_reference=self._release_reference,
            can_scale_up=self._scaler.can_scale_up,
        )
        notes = tuple(self._scaler.notes)
        return starter.build(checkpoint, mode, weights, reference_workers=workers, notes=notes)

    def close(self) -> None:
        """Kill every worker."""
        for cluster in (self.policy, self.reference):
            if cluster is not None:
                cluster.close()

    def _cluster(self, role: str, worker_cls: type, *, joins_process_group: bool) -> Cluster:
        config, log_dir = WorkerConfig(role, self._config.environment_of(role)), logging_dir(self._config)
        cluster = Cluster(role, worker_cls, self._resources, config, self._monitor, log_dir)
        cluster.call("claim_device", role, log_dir.resolve())
        if joins_process_group:
            cluster.join_process_group()
        return cluster

    def _open_logs(self, cluster: Cluster) -> list[Call]:
        directory = logging_dir(self._config).resolve()  # a worker may have another working directory
        environment = sorted(self._config.environment_of(cluster.name))
        return cluster.submit("open_log", directory, cluster.name, logger.getEffectiveLevel(), environment)

    def _release_reference(self) -> None:
        if self.reference is not None:
            self.reference.close()
            self.reference = None
        self._resources.release("reference")


@contextlib.contextmanager
def open_ray_runtime(config: DPOConfig, objective: Objective) -> Iterator[RayRuntime]:
    """Connect to Ray, reserve the resources of all roles, and release them at the end."""
    mode = reference_mode(config, objective)
    with ray_session(config.ray_address):
        names = ["actor_train", *(["reference"] if reference_has_workers(config, mode) else [])]
        scaler = ElasticScaler(config, alive_nodes, ray.available_resources, names)
        roles = {name: getattr(scaler.config, name) for name in names}
        demands = [RoleDemand(name, tuple(r.device_mapping or ()), r.num_processes) for name, r in roles.items()]
        resources = ResourceManager(demands, config.num_gpus_per_node, concurrent=mode == "concurrent")
        runtime = RayRuntime(scaler.config, mode, resources, scaler)
        try:
            yield runtime
        finally:
            runtime.close()
            resources.close()
