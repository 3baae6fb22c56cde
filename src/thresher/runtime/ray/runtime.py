"""Runtime for a run on Ray: starts the clusters of the policy and the reference and connects them."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray

from thresher.builders.hardware import Hardware
from thresher.builders.inputs import RunInputs
from thresher.builders.reference import FoundSplits, look_up
from thresher.builders.reference_mode import ReferenceMode, reference_has_workers
from thresher.config import DPOConfig
from thresher.models.layouts import Layout
from thresher.observability.timing import PhaseClock
from thresher.runtime.devices import CPU
from thresher.runtime.group import Runtime, with_absolute_cache_dir
from thresher.runtime.ray.cluster import Call, Cluster, ResourceManager, alive_nodes, wait_for
from thresher.runtime.ray.fork_server import ForkServers
from thresher.runtime.ray.heartbeat_monitor import HeartbeatMonitor
from thresher.runtime.ray.placement import ElasticScaler, note_idle_devices
from thresher.runtime.ray.session import RaySession
from thresher.runtime.ray.workers import ActorWorker, ReferenceWorker
from thresher.training.trainer import Record

logger = logging.getLogger(__name__)

# shorter runs end before a fork server has imported its code, and would share the cores with it
_SECONDS_BEFORE_FORKS = 20.0


class RayRuntime(Runtime):
    """Starts the clusters of a run. Both may outlive a start, as a library user may start several runs."""

    scorers: Cluster | None

    def __init__(
        self,
        config: DPOConfig,
        mode: ReferenceMode,
        resources: ResourceManager,
        scaler: ElasticScaler | None = None,
        clock: PhaseClock | None = None,
        forks: ForkServers | None = None,
    ):
        self.config = with_absolute_cache_dir(config, mode)
        self.scorers = None
        self._policy: Cluster | None = None
        self._resources = resources
        self._scaler = scaler or ElasticScaler(config, alive_nodes, ray.available_resources)
        self._clock = clock or PhaseClock()
        self._forks = forks
        self._forks_at = math.inf  # when to start the fork servers that a restart needs
        self._monitor = HeartbeatMonitor(config.heartbeat_timeout)

    def use(self, policy: Cluster | None, reference: Cluster | None) -> None:
        """Use the workers of an earlier run."""
        self._policy, self.scorers = policy, reference

    @property
    def ranks(self) -> Cluster:
        """The workers of the policy, started on first use."""
        self._policy = self._policy or self._cluster("actor_train", ActorWorker, joins_process_group=True)
        return self._policy

    def smallest_gpu(self) -> Hardware | None:
        # without a mapping, workers have no GPU, and need not be waited for
        return super().smallest_gpu() if self.config.actor_train.device_mapping else None

    def load(self, inputs: RunInputs, checkpoint: Path | None) -> tuple[Layout, tuple[str, ...]]:
        """Load the models on all workers in parallel, connect the clusters, and build the trainers."""
        config, mode = self.config, inputs.mode
        _ = inputs.frozen_weights  # hashed here once and sent to the workers; its time counts as the data's
        self._clock.end("data")
        policy = self.ranks
        opening = self._open(policy)
        loading = policy.submit("load", inputs)
        workers: tuple[Any, ...] = ()
        found: FoundSplits | None = None
        has_workers = reference_has_workers(config, mode)
        if has_workers and mode == "precompute":
            splits = [split for split in look_up(inputs, CPU) if split is not None]
            found = [split.found_logps for split in splits]
            has_workers = any(split.num_missing for split in splits)  # pairs that the cache has need no reference
        if has_workers:
            self._resources.reserve("reference")
            self.scorers = self.scorers or self._cluster(
                "reference", ReferenceWorker, joins_process_group=not config.reference.is_replicated
            )
            opening += self._open(self.scorers)
            wait_for([*loading, *self.scorers.submit("load", inputs, found)])
            workers = tuple(self.scorers.workers)
        layout, hidden_size = wait_for(loading)[0]
        self._clock.end("model")
        for warning in dict.fromkeys(itertools.chain.from_iterable(wait_for(opening))):
            logger.warning("%s", warning)
        notes = policy.call("build", checkpoint, workers, found)[0]
        if self.scorers is not None and workers:
            self.scorers.call("serve", layout, hidden_size, config.actor_train.num_data_ranks)
        self._clock.end("checkpoint")
        if config.max_restarts:
            self._forks_at = time.monotonic() + _SECONDS_BEFORE_FORKS
        return layout, (*notes, *self._scaler.notes)

    def run(self, until: int) -> Iterator[Record]:
        for record in super().run(until):
            if time.monotonic() > self._forks_at:
                self._start_fork_servers()
            yield record

    def _start_fork_servers(self) -> None:
        """Prepare a restart on the nodes of this attempt, with the modules that its workers have imported."""
        self._forks_at = math.inf
        for cluster in (self._policy, self.scorers):
            if self._forks is not None and cluster is not None:
                modules = cluster.workers[0].imported_modules.remote()
                self._forks.start(cluster.nodes, cluster.environment, modules)

    def can_scale_up(self) -> str | None:
        return self._scaler.can_scale_up()

    def release_scorers(self) -> None:
        """End the workers of the reference, and free their devices."""
        if self.scorers is not None:
            self.scorers.close()
            self.scorers = None
        self._resources.release("reference")

    def close(self) -> None:
        """Kill every worker."""
        for cluster in (self._policy, self.scorers):
            if cluster is not None:
                cluster.close()

    def _cluster(self, role: str, worker_cls: type, *, joins_process_group: bool) -> Cluster:
        log_dir = self.config.log_dir
        environment = self.config.environment_of(role)
        cluster = Cluster(role, worker_cls, self._resources, environment, self._monitor, log_dir, self._forks)
        uses_gpu = bool(getattr(self.config, role).device_mapping)
        import_seconds = cluster.call("claim_device", role, log_dir.resolve(), uses_gpu)
        self._clock.end("processes", of_which=("import", max(import_seconds)))
        for warning in cluster.compare_clocks():
            logger.warning("%s", warning)
        if joins_process_group:  # the first worker hosts the rendezvous
            (address,) = wait_for([Call(cluster, 0, cluster.workers[0].start_rendezvous.remote())])
            cluster.call("join", address)
        self._clock.end("rendezvous")
        return cluster

    def _open(self, cluster: Cluster) -> list[Call]:
        directory = self.config.log_dir.resolve()  # a worker may have a different working directory
        # one worker per node checks it; the driver has checked its own, which is the only one without ray_address
        checked = self.ranks.nodes if cluster is not self._policy else []
        checking = [
            rank for node, rank in cluster.first_ranks.items() if self.config.ray_address and node not in checked
        ]
        return cluster.submit("take", self.config, cluster.name, directory, logger.getEffectiveLevel(), checking)


@contextlib.contextmanager
def open_ray_runtime(
    config: DPOConfig, mode: ReferenceMode, clock: PhaseClock | None = None, session: RaySession | None = None
) -> Iterator[RayRuntime]:
    """Connect to Ray, fit the run to its nodes and reserve their resources, or raise; end all workers at the end.

    session: the connection, if the caller makes several attempts.
    """
    clock = clock or PhaseClock()
    with contextlib.ExitStack() as stack:
        session = session or stack.enter_context(RaySession(config.ray_address))
        stack.enter_context(session.attempt())
        names = ["actor_train", *(["reference"] if reference_has_workers(config, mode) else [])]
        scaler = ElasticScaler(config, alive_nodes, ray.available_resources, names)
        roles = {name: getattr(scaler.config, name) for name in names}
        resources = ResourceManager(roles, config.num_gpus_per_node, concurrent=mode == "concurrent")
        stack.callback(resources.close)
        for note in note_idle_devices(roles, int(ray.available_resources().get("GPU", 0))):
            logger.warning("%s", note)
        clock.end("processes")
        runtime = RayRuntime(scaler.config, mode, resources, scaler, clock, session.forks)
        stack.callback(runtime.close)
        try:
            yield runtime
        except BaseException:
            clock.restart()
            raise
