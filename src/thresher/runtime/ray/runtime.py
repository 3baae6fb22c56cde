"""Runtime for a run on Ray: starts the clusters of the policy and the reference and connects them."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import ray

from thresher.builders.inputs import RunInputs
from thresher.builders.precompute import ProgressCallback
from thresher.builders.reference import frozen_weights_digest
from thresher.builders.reference_mode import reference_has_workers, reference_mode
from thresher.builders.run import logging_dir
from thresher.builders.token_budget import with_token_budget
from thresher.config import DPOConfig
from thresher.errors import WorkerError, WorkerLostError
from thresher.losses.objective import Objective
from thresher.observability.details import DETAIL
from thresher.observability.timing import PhaseClock
from thresher.reference.modes import ReferenceMode
from thresher.runtime import RunHandle
from thresher.runtime.group import CachedReference, GroupStarter, with_absolute_cache_dir
from thresher.runtime.ray.cluster import Call, Cluster, wait_for
from thresher.runtime.ray.elastic import ElasticScaler
from thresher.runtime.ray.heartbeat_monitor import HeartbeatMonitor
from thresher.runtime.ray.placement import RoleDemand, note_idle_devices
from thresher.runtime.ray.resources import ResourceManager, alive_nodes
from thresher.runtime.ray.session import SessionFiles, ray_session
from thresher.runtime.ray.spares import SparePool
from thresher.runtime.ray.starter import WorkerConfig
from thresher.runtime.ray.workers import ActorWorker, ReferenceWorker

logger = logging.getLogger(__name__)


class RayRuntime:
    """Starts the clusters of a run. spares: idle workers that it uses, and whose number it maintains."""

    def __init__(
        self,
        config: DPOConfig,
        mode: ReferenceMode,
        resources: ResourceManager,
        scaler: ElasticScaler | None = None,
        spares: SparePool | None = None,
        clock: PhaseClock | None = None,
    ):
        self._config = with_absolute_cache_dir(config, mode)
        self._mode = mode
        self._resources = resources
        self._scaler = scaler or ElasticScaler(config, alive_nodes, ray.available_resources)
        self._spares = spares or SparePool(0)
        self._clock = clock or PhaseClock()
        self._monitor = HeartbeatMonitor(config.heartbeat_timeout, self._spares.maintain)
        self.policy: Cluster | None = None
        self.reference: Cluster | None = None

    def find_damage(self, checkpoint: Path) -> list[str]:
        damage: list[str] = self._policy_cluster().call("find_damage", checkpoint)[0]
        return damage

    def start(self, inputs: RunInputs, checkpoint: Path | None, progress: ProgressCallback) -> RunHandle:
        """Load the models on all workers in parallel, connect the clusters, and restore a checkpoint, if any."""
        config, mode = self._config, self._mode
        weights = frozen_weights_digest(config, mode)
        self._clock.end("data")
        policy = self._policy_cluster()
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
            self._resources.reserve("reference")
            reference = self.reference or self._cluster(
                "reference", ReferenceWorker, joins_process_group=not config.reference.is_replicated
            )
            self.reference = reference
            opening += self._open_logs(reference)
            loaded = wait_for([*loading, *reference.submit("load", config, inputs)])[0]
            reference.call("serve", loaded, config.actor_train.num_data_ranks)
            workers = tuple(reference.workers)
        loaded = wait_for(loading)[0]
        self._clock.end("model")
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
        handle = starter.build(checkpoint, mode, weights, reference_workers=workers, notes=notes)
        self._clock.end("checkpoint")
        self._spares.watch(policy, is_replaced=True)
        if self.reference is not None:  # a precomputed one is not needed again
            self._spares.watch(self.reference, is_replaced=mode == "concurrent")
        return handle

    def close(self) -> None:
        """Kill every worker."""
        for cluster in (self.policy, self.reference):
            if cluster is not None:
                cluster.close()

    def _policy_cluster(self) -> Cluster:
        """The workers of the policy; they may outlive a start, as a library user may start several runs."""
        self.policy = self.policy or self._cluster("actor_train", ActorWorker, joins_process_group=True)
        return self.policy

    def _cluster(self, role: str, worker_cls: type, *, joins_process_group: bool) -> Cluster:
        config, log_dir = WorkerConfig(role, self._config.environment_of(role)), logging_dir(self._config)
        cluster = Cluster(role, worker_cls, self._resources, config, self._monitor, log_dir, self._spares)
        uses_gpu = bool(getattr(self._config, role).device_mapping)
        processes = cluster.call("claim_device", role, log_dir.resolve(), uses_gpu)
        imports = (each.import_seconds for rank, each in enumerate(processes) if rank not in cluster.from_spares)
        self._clock.end("processes", of_which=("import", max(imports, default=0.0)))
        if cluster.from_spares:
            logger.info("%d of %d %s workers are spares", len(cluster.from_spares), len(cluster), role, extra=DETAIL)
        if joins_process_group:
            cluster.join_process_group()
        self._clock.end("rendezvous")
        cluster.processes = processes
        return cluster

    def _open_logs(self, cluster: Cluster) -> list[Call]:
        directory = logging_dir(self._config).resolve()  # a worker may have another working directory
        environment = sorted(self._config.environment_of(cluster.name))
        return cluster.submit("open_log", directory, cluster.name, logger.getEffectiveLevel(), environment)

    def _release_reference(self) -> None:
        if self.reference is not None:
            self.reference.close()
            self.reference = None
        self._spares.forget("reference")
        self._resources.release("reference")


class RaySession:
    """The connection to Ray, the reserved resources and the spares of a run, which outlive a failed attempt.

    After a failure of workers they are used again if spares answer on every node of the run. Otherwise a node may be
    lost, so that the next attempt connects, fits the run to the nodes and reserves their resources anew.
    """

    def __init__(self, config: DPOConfig, objective: Objective, clock: PhaseClock):
        self._config = config
        self._mode = reference_mode(config, objective)
        self._clock = clock
        self._spares = SparePool(config.spare_workers if config.max_restarts else 0)
        self._opened = contextlib.ExitStack()
        self._files = SessionFiles()
        self._reserved: tuple[ElasticScaler, ResourceManager] | None = None

    def __enter__(self) -> RaySession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._close(error)

    @contextlib.contextmanager
    def open_runtime(self) -> Iterator[RayRuntime]:
        """Reserve the resources of all roles, or raise; end all workers at the end of the attempt."""
        try:
            scaler, resources = self._reserve()
            runtime = RayRuntime(scaler.config, self._mode, resources, scaler, self._spares, self._clock)
            try:
                yield runtime
            except BaseException:
                self._clock.restart()
                raise
            finally:
                runtime.close()
        except (WorkerLostError, WorkerError):
            self._files.are_kept = True
            raise
        except BaseException as error:
            self._close(error)
            raise

    def _reserve(self) -> tuple[ElasticScaler, ResourceManager]:
        if self._reserved is not None and self._spares.take_over():
            self._clock.end("stop")
            return self._reserved
        self._close(None)
        config, mode = self._config, self._mode
        self._files = self._opened.enter_context(ray_session(config.ray_address))
        self._opened.callback(self._spares.close)
        names = ["actor_train", *(["reference"] if reference_has_workers(config, mode) else [])]
        scaler = ElasticScaler(config, alive_nodes, ray.available_resources, names)
        roles = {name: getattr(scaler.config, name) for name in names}
        demands = [RoleDemand(name, tuple(r.device_mapping or ()), r.num_processes) for name, r in roles.items()]
        resources = ResourceManager(demands, config.num_gpus_per_node, concurrent=mode == "concurrent")
        self._opened.callback(resources.close)
        for note in note_idle_devices(demands, int(ray.available_resources().get("GPU", 0))):
            logger.warning("%s", note)
        self._reserved = scaler, resources
        self._clock.end("processes")
        return self._reserved

    def _close(self, error: BaseException | None) -> None:
        """Release everything. error: what ended the session; it decides whether Ray's files are kept."""
        self._reserved = None
        self._opened.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)


@contextlib.contextmanager
def open_ray_runtime(config: DPOConfig, objective: Objective) -> Iterator[RayRuntime]:
    """Open a session for a single attempt."""
    with RaySession(config, objective, PhaseClock()) as session, session.open_runtime() as runtime:
        yield runtime
