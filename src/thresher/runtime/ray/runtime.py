"""A run on Ray: a cluster for the policy, one for the reference where it works on its own, and the order of events."""

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
from thresher.builders.reference import frozen_weights_digest, reference_mode
from thresher.builders.run import logging_dir
from thresher.config import DPOConfig
from thresher.config.roles import RoleConfig
from thresher.errors import RescaleRequested, UserError
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
from thresher.training.trainer import Record

logger = logging.getLogger(__name__)


class RayTrainerGroup:
    """All ranks of the policy as one trainable: every call goes to all, rank 0 answers.

    room_for_more is asked after a checkpoint, before the next step: what it says is why all are to be built anew.
    """

    def __init__(self, cluster: Cluster, can_scale_up: Callable[[], str | None] = lambda: None):
        self._cluster = cluster
        self._room_for_more = can_scale_up
        self._is_saved = False

    def run(self, until: int) -> Iterator[Record]:
        if self._is_saved and (reason := self._room_for_more()):
            self.wait_for_saves()
            raise RescaleRequested(reason)
        self._is_saved = False
        return self._cluster.stream("run", "follow", until)

    @property
    def stopped_at(self) -> int | None:
        stopped_at: int | None = self._cluster.call("stopped_at")[0]
        return stopped_at

    def evaluate_and_record(self) -> dict[str, float]:
        measured: dict[str, float] = self._cluster.call("evaluate_and_record")[0]
        return measured

    def save(self) -> None:
        self._cluster.call("save")
        self._is_saved = True

    def wait_for_saves(self) -> None:
        self._cluster.call("wait_for_saves")


class RayRuntime:
    """Start the clusters of a run and bring them to the first step."""

    def __init__(
        self,
        config: DPOConfig,
        mode: ReferenceMode,
        resources: ResourceManager,
        elasticity: ElasticScaler | None = None,
    ):
        self._config = config if mode != "precompute" else _with_cache_place(config)
        self._mode = mode
        self._resources = resources
        self._elasticity = elasticity or ElasticScaler(config, alive_nodes, ray.available_resources)
        self._watch = HeartbeatMonitor(config.heartbeat_timeout)
        self.policy: Cluster | None = None
        self.reference: Cluster | None = None

    def start(self, inputs: RunInputs, checkpoint: Path | None, progress: ProgressCallback) -> RunHandle:
        """Load the models everywhere at once, link the clusters, and go on from a checkpoint."""
        config, mode = self._config, self._mode
        weights = frozen_weights_digest(config, mode)
        # clusters that are there already serve the next run as well
        policy = self.policy = self.policy or self._cluster("actor_train", ActorWorker, joins_process_group=True)
        opening, loading = self._open_logs(policy), policy.submit("load", config, inputs)
        num_found, num_missing = _count_cached(config, inputs, weights) if mode == "precompute" else (0, 0)
        workers: tuple[Any, ...] = ()
        if num_missing or (mode == "concurrent" and reference_has_workers(config, mode)):
            reference = self.reference or self._cluster(
                "reference", ReferenceWorker, joins_process_group=not axis_sizes(config.reference).is_replicated
            )
            self.reference = reference
            opening += self._open_logs(reference)
            hidden_size = wait_for([*loading, *reference.submit("load", config, inputs)])[0]
            reference.call("serve", hidden_size, config.actor_train.num_data_ranks)
            workers = tuple(reference.workers)
        wait_for(loading)
        for fault in filter(None, dict.fromkeys(wait_for(opening))):
            logger.warning("%s", fault)
        reports = policy.call("build", checkpoint, ReferenceHandle(mode, weights, workers))
        report = reports[0]

        def begin() -> None:
            seconds_per_pair = None
            if mode == "precompute" and report.standing.step < inputs.plan.num_steps:
                seconds_per_pair = self._score_missing(str(weights), progress) / inputs.plan.num_visits
                found, scored = f"{num_found:,}", f"{num_missing:,}"
                logger.info("reference: %s pairs from the cache, %s scored by its workers", found, scored)
            if mode == "precompute":
                self._release_reference()
            policy.call("begin", seconds_per_pair)

        num_nodes = len({each.node_id for each in reports})
        place = f"{len(policy)} x {report.device} on {num_nodes} node{'s' if num_nodes > 1 else ''}"
        notes = (*report.notes, *self._elasticity.notes, *self._idle_workers())
        trainers = RayTrainerGroup(policy, self._elasticity.can_scale_up)
        return RunHandle(trainers, report.standing, report.reference_mode, place, notes, begin)

    def close(self) -> None:
        """End every worker."""
        for cluster in (self.policy, self.reference):
            if cluster is not None:
                cluster.close()

    def _idle_workers(self) -> list[str]:
        if self._mode != "concurrent" or reference_has_workers(self._config, self._mode):
            return []
        return [
            f"reference.{name} has no effect here: a synced reference lives in the policy's workers"
            for name in self._config.reference.non_default("device_mapping", "num_workers")
        ]

    def _cluster(self, role: str, worker_cls: type, *, joins_process_group: bool) -> Cluster:
        return Cluster(role, worker_cls, self._resources, WorkerConfig(role, joins_process_group), self._watch)

    def _open_logs(self, cluster: Cluster) -> list[Call]:
        directory = logging_dir(self._config).resolve()  # workers may stand in another directory
        return cluster.submit("open_log", directory, cluster.name, logger.getEffectiveLevel())

    def _score_missing(self, weights: str, progress: ProgressCallback) -> float:
        """Let the reference's workers, if it has any, fill the cache; return the seconds that it took."""
        started = time.perf_counter()
        if self.reference is not None:
            for what, done, total in self.reference.stream("score_missing", "score_missing_quietly", weights):
                progress(f"scoring the reference: {what} pairs, blocks of the first worker", done, total)
        return time.perf_counter() - started

    def _release_reference(self) -> None:
        if self.reference is not None:
            self.reference.close()
            self.reference = None
        self._resources.release("reference")


def _count_cached(config: DPOConfig, inputs: RunInputs, weights: str | None) -> tuple[int, int]:
    """Say how many of the run's pairs the cache has and how many it lacks: without a gap nobody loads the reference."""
    both = cached_splits(config, inputs, str(weights), torch.device("cpu"))
    splits = [split for split in both if split is not None]
    num_missing = sum(split.num_missing for split in splits)
    return sum(split.num_pairs for split in splits) - num_missing, num_missing


def _with_cache_place(config: DPOConfig) -> DPOConfig:
    """Say where the cache is: a worker's environment need not be the driver's."""
    place = str(cache_root(config.reference.cache_dir).resolve())
    return config.model_copy(update={"reference": config.reference.model_copy(update={"cache_dir": place})})


def reference_has_workers(config: DPOConfig, mode: ReferenceMode) -> bool:
    """A synced reference follows the policy's weights, so it lives in the policy's own workers."""
    return mode == "precompute" or (mode == "concurrent" and config.reference.sync_steps is None)


@contextlib.contextmanager
def open_ray_runtime(config: DPOConfig, objective: Objective) -> Iterator[RayRuntime]:
    """Connect, reserve what the roles ask for, and give it all back at the end."""
    mode = reference_mode(config, objective)
    if mode == "concurrent" and reference_has_workers(config, mode) and not axis_sizes(config.reference).is_replicated:
        raise UserError(
            "a reference that works ahead has a whole copy in every worker; set reference.strategy_args.strategy_name "
            "to hf_infer, or reference.mode to precompute"
        )
    with ray_session(config.ray_address):
        names = ["actor_train", *(["reference"] if reference_has_workers(config, mode) else [])]
        elasticity = ElasticScaler(config, alive_nodes, ray.available_resources, names)
        fitted = elasticity.config
        roles = [_demand(name, getattr(fitted, name)) for name in names]
        resources = ResourceManager(roles, config.num_gpus_per_node, at_once=mode == "concurrent")
        runtime = RayRuntime(fitted, mode, resources, elasticity)
        try:
            yield runtime
        finally:
            runtime.close()
            resources.close()


def _demand(name: str, role: RoleConfig) -> RoleDemand:
    return RoleDemand(name, tuple(role.device_mapping or ()), role.num_processes)
