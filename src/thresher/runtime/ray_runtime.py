"""A run on Ray: a cluster for the policy, one for the reference where it works on its own, and the order of events."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from thresher.assembly.inputs import RunInputs
from thresher.assembly.objective import build_objective
from thresher.assembly.reference import reference_mode
from thresher.config import DPOConfig
from thresher.config.roles import RoleConfig
from thresher.data.plan import PairIds
from thresher.reference.modes import Mode
from thresher.reference.scorers import PrecomputedReference
from thresher.runtime import Started
from thresher.runtime.cluster import Cluster, WorkerConfig
from thresher.runtime.placement import RoleDemand
from thresher.runtime.remote_reference import ReferenceLink, ScoredBlocks, ScoredInAdvance
from thresher.runtime.resources import ResourceManager
from thresher.runtime.session import ray_session
from thresher.runtime.workers import ActorWorker, ReferenceWorker
from thresher.trainer import Record

Progress = Callable[[str, int, int], None]
# neighbouring blocks in one answer, so that answers are neither many nor huge
_BLOCKS_PER_CALL = 32


@dataclass(frozen=True)
class RayTrainers:
    """All ranks of the policy as one trainable: every call goes to all, rank 0 answers."""

    cluster: Cluster

    def run(self, until: int) -> Iterator[Record]:
        return self.cluster.stream("run", "follow", until)

    def measure(self) -> dict[str, float]:
        measured: dict[str, float] = self.cluster.call("measure")[0]
        return measured

    def save(self) -> None:
        self.cluster.call("save")


class RayRuntime:
    """Start the clusters of a run and bring them to the first step."""

    def __init__(self, config: DPOConfig, mode: Mode, resources: ResourceManager):
        self._config = config
        self._mode = mode
        self._resources = resources
        self.policy: Cluster | None = None
        self.reference: Cluster | None = None

    def start(self, inputs: RunInputs, checkpoint: Path | None, progress: Progress) -> Started:
        """Load the models everywhere at once, link the clusters, and go on from a checkpoint."""
        config = self._config
        # clusters that are there already serve the next run as well
        policy = self.policy = self.policy or self._cluster("actor_train", ActorWorker, joins_process_group=True)
        loading, link = policy.submit("load", config, inputs), None
        if reference_has_workers(config, self._mode):
            reference = self.reference or self._cluster("reference", ReferenceWorker, joins_process_group=False)
            self.reference = reference
            digest = reference.call("load", config, inputs)[0]
            hidden_size = policy.wait(loading)[0]
            reference.call("serve", hidden_size, len(policy))
            link = ReferenceLink(self._mode, digest, tuple(reference.workers))
        policy.wait(loading)
        reports = policy.call("build", checkpoint, link)
        report = reports[0]

        def begin() -> None:
            scored = None
            if self._mode == "precompute" and report.standing.step < inputs.plan.num_steps:
                scored = self._score_in_advance(inputs, progress)
            policy.call("begin", scored)
            if self._mode == "precompute":
                self._release_reference()

        num_nodes = len({each.node_id for each in reports})
        place = f"{len(policy)} x {report.device} on {num_nodes} node{'s' if num_nodes > 1 else ''}"
        notes = (*report.notes, *self._idle_workers())
        return Started(RayTrainers(policy), report.standing, report.reference_mode, place, notes, begin)

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
            for name in self._config.reference.turned("device_mapping", "num_workers")
        ]

    def _cluster(self, role: str, worker_cls: type, *, joins_process_group: bool) -> Cluster:
        return Cluster(role, worker_cls, self._resources, WorkerConfig(role, joins_process_group))

    def _score_in_advance(self, inputs: RunInputs, progress: Progress) -> ScoredInAdvance:
        started = time.perf_counter()
        train = self._score_blocks("train", inputs.plan.visited_pairs(), "training", progress)
        seconds = time.perf_counter() - started
        held_out: tuple[ScoredBlocks, ...] = ()
        if inputs.validation is not None:
            every = np.arange(len(inputs.validation), dtype=np.int64)
            held_out = self._score_blocks("validation", every, "held-out", progress)
        return ScoredInAdvance(train, held_out, seconds / max(1, inputs.plan.num_visits))

    def _score_blocks(
        self, split: Literal["train", "validation"], pair_ids: PairIds, what: str, progress: Progress
    ) -> tuple[ScoredBlocks, ...]:
        cluster = self.reference
        if cluster is None:
            raise RuntimeError("the reference has no workers to score with")
        table = PrecomputedReference(self._config.reference.infer_batch_size, torch.device("cpu"))
        blocks = table.blocks_with(pair_ids)
        finished, scored = [], []
        for at in range(0, len(blocks), _BLOCKS_PER_CALL):
            part = tuple(blocks[at : at + _BLOCKS_PER_CALL])
            rank = at // _BLOCKS_PER_CALL % len(cluster)
            # two answers: the driver waits for the count, and the logps stay where the policy will ask for them
            done, logps = cluster.workers[rank].score_blocks.options(num_returns=2).remote(split, part)
            finished.append((rank, done))
            scored.append(ScoredBlocks(part, logps))
        cluster.wait(finished, lambda done: progress(f"scoring the reference: {what} pairs", done, len(finished)))
        return tuple(scored)

    def _release_reference(self) -> None:
        if self.reference is not None:
            self.reference.close()
            self.reference = None
            self._resources.release("reference")


def reference_has_workers(config: DPOConfig, mode: Mode) -> bool:
    """A synced reference follows the policy's weights, so it lives in the policy's own workers."""
    return mode == "precompute" or (mode == "concurrent" and config.reference.sync_steps is None)


@contextlib.contextmanager
def open_ray_runtime(config: DPOConfig) -> Iterator[RayRuntime]:
    """Connect, reserve what the roles ask for, and give it all back at the end."""
    mode = reference_mode(config, build_objective(config))
    roles = [_demand("actor_train", config.actor_train)]
    if reference_has_workers(config, mode):
        roles.append(_demand("reference", config.reference))
    with ray_session(config.ray_address):
        resources = ResourceManager(roles, config.num_gpus_per_node, at_once=mode == "concurrent")
        runtime = RayRuntime(config, mode, resources)
        try:
            yield runtime
        finally:
            runtime.close()
            resources.close()


def _demand(name: str, role: RoleConfig) -> RoleDemand:
    return RoleDemand(name, tuple(role.device_mapping or ()), role.num_processes)
