"""Runtime for a run on Ray: starts the clusters of the policy and the reference and connects them."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ray
import torch

from thresher.builders.axes import axis_sizes
from thresher.builders.inputs import RunInputs
from thresher.builders.precompute import ProgressCallback
from thresher.builders.reference import frozen_weights_digest
from thresher.builders.reference_mode import reference_has_workers, reference_mode
from thresher.builders.run import logging_dir
from thresher.config import DPOConfig
from thresher.errors import RescaleRequested
from thresher.losses.objective import Objective
from thresher.reference.cache_admin import cache_root
from thresher.reference.modes import ReferenceMode
from thresher.runtime import RunHandle
from thresher.runtime.ray.cluster import Call, Cluster, WorkerConfig, wait_for
from thresher.runtime.ray.elastic import ElasticScaler
from thresher.runtime.ray.heartbeat_monitor import HeartbeatMonitor
from thresher.runtime.ray.placement import RoleDemand
from thresher.runtime.ray.remote_reference import ReferenceHandle, cached_splits
from thresher.runtime.ray.resources import ResourceManager, alive_nodes
from thresher.runtime.ray.session import ray_session
from thresher.runtime.ray.workers import ActorWorker, ReferenceWorker
from thresher.training.trainer import EvaluationRecord, Record

logger = logging.getLogger(__name__)


class RayTrainerGroup:
    """All ranks of the policy as one `Trainable`: every call goes to all ranks and returns the result of rank 0.

    can_scale_up: called between a checkpoint and the next step; a message from it requests a restart with more workers.
    """

    def __init__(self, cluster: Cluster, can_scale_up: Callable[[], str | None] = lambda: None):
        self._cluster = cluster
        self._can_scale_up = can_scale_up
        self._is_saved = False

    def run(self, until: int) -> Iterator[Record]:
        if self._is_saved and (reason := self._can_scale_up()):
            self.wait_for_saves()
            raise RescaleRequested(reason)
        self._is_saved = False
        return self._cluster.stream("run", "run_quietly", until)

    @property
    def stopped_at(self) -> int | None:
        stopped_at: int | None = self._cluster.call("stopped_at")[0]
        return stopped_at

    def evaluate_and_record(self) -> Iterator[EvaluationRecord]:
        return self._cluster.stream("evaluate_and_record", "evaluate_quietly")

    def save(self) -> None:
        self._cluster.call("save")
        self._is_saved = True

    def wait_for_saves(self) -> None:
        self._cluster.call("wait_for_saves")


class RayRuntime:
    """Starts the clusters of a run."""

    def __init__(
        self,
        config: DPOConfig,
        mode: ReferenceMode,
        resources: ResourceManager,
        scaler: ElasticScaler | None = None,
    ):
        self._config = config if mode != "precompute" else _with_absolute_cache_dir(config)
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
        opening, loading = self._open_logs(policy), policy.submit("load", config, inputs)
        num_found, num_missing = _count_cached(config, inputs, weights) if mode == "precompute" else (0, 0)
        workers: tuple[Any, ...] = ()
        has_workers = reference_has_workers(config, mode)
        if has_workers and (num_missing or mode == "concurrent"):
            reference = self.reference or self._cluster(
                "reference", ReferenceWorker, joins_process_group=not axis_sizes(config.reference).is_replicated
            )
            self.reference = reference
            opening += self._open_logs(reference)
            loaded = wait_for([*loading, *reference.submit("load", config, inputs)])[0]
            reference.call("serve", loaded, config.actor_train.num_data_ranks)
            workers = tuple(reference.workers)
        loaded = wait_for(loading)[0]
        for warning in filter(None, dict.fromkeys(wait_for(opening))):
            logger.warning("%s", warning)
        on_policy_axes = not has_workers and not num_found
        reports = policy.call("build", checkpoint, ReferenceHandle(mode, weights, workers, on_policy_axes))
        report = reports[0]

        def begin() -> None:
            seconds_per_pair = None
            if mode == "precompute" and report.progress.step < inputs.plan.num_steps:
                scorers = self.reference or policy
                seconds_per_pair = 0.0
                if num_missing:
                    seconds_per_pair = _score_missing(scorers, str(weights), progress) / inputs.plan.num_visits
                found, scored = f"{num_found:,}", f"{num_missing:,}"
                owner = "its" if has_workers else "the policy's"
                logger.info("reference: %s pairs from the cache, %s scored by %s workers", found, scored, owner)
            if mode == "precompute":
                self._release_reference()
            policy.call("begin", seconds_per_pair)

        num_nodes = len({each.node_id for each in reports})
        devices = f"{len(policy)} x {report.device} on {num_nodes} node{'s' if num_nodes > 1 else ''}"
        notes = (*loaded.notes, *report.notes, *self._scaler.notes)
        trainers = RayTrainerGroup(policy, self._scaler.can_scale_up)
        return RunHandle(
            trainers,
            report.progress,
            report.reference_mode,
            loaded.layout.name,
            devices,
            report.parameter_counts,
            notes,
            begin,
        )

    def close(self) -> None:
        """Kill every worker."""
        for cluster in (self.policy, self.reference):
            if cluster is not None:
                cluster.close()

    def _cluster(self, role: str, worker_cls: type, *, joins_process_group: bool) -> Cluster:
        config = WorkerConfig(role, joins_process_group, self._config.environment_of(role))
        return Cluster(role, worker_cls, self._resources, config, self._monitor, logging_dir(self._config))

    def _open_logs(self, cluster: Cluster) -> list[Call]:
        directory = logging_dir(self._config).resolve()  # a worker may have another working directory
        environment = sorted(self._config.environment_of(cluster.name))
        return cluster.submit("open_log", directory, cluster.name, logger.getEffectiveLevel(), environment)

    def _release_reference(self) -> None:
        if self.reference is not None:
            self.reference.close()
            self.reference = None
        self._resources.release("reference")


def _score_missing(scorers: Cluster, weights: str, progress: ProgressCallback) -> float:
    """Let workers fill the cache; return the elapsed seconds."""
    started = time.perf_counter()
    for what, done, total in scorers.stream("score_missing", "score_missing_quietly", weights):
        progress(f"scoring the reference: {what} pairs, blocks of worker 0", done, total)
    return time.perf_counter() - started


def _count_cached(config: DPOConfig, inputs: RunInputs, weights: str | None) -> tuple[int, int]:
    """Count the pairs of the run that the cache has and lacks; if it lacks none, the reference is not loaded."""
    both = cached_splits(config, inputs, str(weights), torch.device("cpu"))
    splits = [split for split in both if split is not None]
    num_missing = sum(split.num_missing for split in splits)
    return sum(split.num_pairs for split in splits) - num_missing, num_missing


def _with_absolute_cache_dir(config: DPOConfig) -> DPOConfig:
    """Resolve the cache directory in the driver, because a worker's environment may differ."""
    cache_dir = str(cache_root(config.reference_cache_dir).resolve())
    return config.model_copy(update={"reference": config.reference.model_copy(update={"cache_dir": cache_dir})})


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
