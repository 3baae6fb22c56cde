"""The processes of a role, independent of what starts them: `PolicyRank` is one rank of the policy.

Ray calls its methods as those of an actor; under torchrun and srun, rank 0 calls its own and requests the same calls
of the other ranks.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import socket
import time
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from thresher.builders.checked_engines import build_checked_policy, build_checked_reference
from thresher.builders.inputs import RunInputs
from thresher.builders.precompute import look_up_splits, open_cache
from thresher.builders.reference import ReferenceBundle, build_reference_bundle
from thresher.builders.reference_mode import same_initial_weights
from thresher.builders.trainer import TrainerBundle, build_trainer
from thresher.checkpoint.manifest import find_damage, read_manifest
from thresher.config import DPOConfig
from thresher.distributed.groups import SINGLE_PROCESS, Metrics
from thresher.errors import UserError
from thresher.models.layouts import Layout
from thresher.observability.details import DETAIL
from thresher.observability.heartbeat import heartbeat, set_activity
from thresher.observability.run_log import WORKERS, LogFile, open_worker_log
from thresher.observability.throughput import TraceSpan
from thresher.plan.hardware import Gpu, gpu_of
from thresher.redact import redact
from thresher.reference.cache_admin import cache_root
from thresher.reference.modes import ReferenceMode
from thresher.reference.scorers import PrecomputedReference
from thresher.reference.step_zero_check import Forwards
from thresher.runtime.cuda_environment import prepare_cuda, write_flight_record
from thresher.strategies.strategy import InferStrategy, ParameterCounts, TrainStrategy
from thresher.training.loop import TrainingProgress
from thresher.training.trainer import EvaluationRecord, Record, ReferenceScorer

logger = logging.getLogger(__name__)

_PROGRESS_INTERVAL = 2.0  # seconds
ScoringProgress = tuple[str, int, int]  # split, blocks done, blocks of this rank


@dataclass(frozen=True)
class ReferenceHandle:
    """Describes the reference to a policy rank: its mode, the digest of its weights, and its workers, if any.

    on_policy_axes: the policy's ranks score all of its pairs.
    """

    mode: ReferenceMode
    weights: str | None
    workers: tuple[Any, ...] = ()
    on_policy_axes: bool = False


@dataclass(frozen=True)
class LoadedPolicy:
    """What decides the micro-batches of a policy: its hidden size and its layout; notes: why not the chosen layout."""

    hidden_size: int
    layout: Layout
    notes: tuple[str, ...]


@dataclass(frozen=True)
class RankReport:
    """State of a policy rank before its first step."""

    progress: TrainingProgress
    reference_mode: str
    device: str
    parameter_counts: ParameterCounts
    notes: tuple[str, ...]


class Rank:
    """A process of a role, with a log file."""

    def __init__(self, rank: int, size: int, device: torch.device):
        self._rank, self._size, self._device = rank, size, device
        self._world = SINGLE_PROCESS
        self._log: LogFile | None = None
        self._dump_prefix: Path | None = None
        self._device_notes: list[str] = []

    def _prepare_device(self, role: str, log_dir: Path) -> None:
        """Set the environment of this process for its device, before the device is used."""
        self._dump_prefix = log_dir / WORKERS / f"{role}-nccl-"
        self._device_notes = [f"device: {self._device}", *prepare_cuda(self._device, self._dump_prefix)]

    def log_stacks(self) -> None:
        """Write the stacks of all threads to the log, and the last collectives of NCCL beside it."""
        if self._log is not None:
            logger.warning("no worker makes progress; %s; stacks of this one:", heartbeat().activity)
            faulthandler.dump_traceback(self._log.stream)
        if self._device.type == "cuda" and self._dump_prefix is not None:
            path = self._dump_prefix.with_name(f"{self._dump_prefix.name}{self._rank}")
            write_flight_record(path)

    def open_log(self, directory: Path, role: str, level: int, environment: Collection[str] = ()) -> str | None:
        """Log to this worker's file in a run directory; return a warning if it cannot be opened.

        environment: names of the variables that the config sets for this role.
        """
        if self._log is not None:  # of the previous run
            logging.getLogger("thresher").removeHandler(self._log)
            faulthandler.disable()  # it writes to this file
            self._log.close()
            self._log = None
        try:
            self._log = open_worker_log(directory, role, self._rank, level)
        except OSError as error:
            return f"cannot write logs of {role} workers on {socket.gethostname()}: {error}"
        logger.info("worker %d of %d, process %d on %s", self._rank, self._size, os.getpid(), socket.gethostname())
        for note in self._device_notes:
            logger.info("%s", note)
        if environment:  # as this process has it
            shown = redact({name: os.environ.get(name) for name in environment})
            logger.info("environment: %s", ", ".join(f"{name}={value}" for name, value in shown.items()))
        return None


class PolicyRank(Rank):
    """One process of the policy. Its trainer is built by the same functions as in a run in one process."""

    _config: DPOConfig
    _inputs: RunInputs
    _policy: TrainStrategy
    _bundle: TrainerBundle

    def smallest_gpu(self) -> Gpu | None:
        """Find the GPU with least memory of all ranks; None if a rank has none."""
        gpus = self._world.all_gather_object(gpu_of(self._device))
        found = [gpu for gpu in gpus if gpu is not None]
        return min(found, key=lambda gpu: gpu.memory) if len(found) == len(gpus) else None

    def find_damage(self, checkpoint: Path) -> list[str]:
        """Hash this rank's part of the files of a checkpoint; return what all ranks have found."""
        set_activity(f"verifying {checkpoint.name}")
        return find_damage(checkpoint, self._world)

    def load(self, config: DPOConfig, inputs: RunInputs) -> LoadedPolicy:
        """Load the policy and check it on real pairs."""
        set_activity("loading the policy")
        checked = build_checked_policy(config, inputs, device=self._device, world=self._world)
        self._config, self._inputs, self._policy = config, checked.inputs, checked.policy
        logger.info("loaded the policy on %s", self._policy.device, extra=DETAIL)
        return LoadedPolicy(self._policy.hidden_size, checked.inputs.layout, checked.notes)

    def build(self, checkpoint: Path | None, handle: ReferenceHandle) -> RankReport:
        """Build the trainer, and restore a checkpoint if there is one."""
        set_activity("building the trainer" if checkpoint is None else f"reading {checkpoint.name}")
        config, inputs, policy = self._config, self._inputs, self._policy
        first_step = 0 if checkpoint is None else read_manifest(checkpoint).step
        reference = self._build_reference(handle, first_step)
        self._bundle = build_trainer(config, inputs, policy, reference, checkpoint)
        logger.info("ready at step %d of %d", self._bundle.progress.step, inputs.plan.num_steps, extra=DETAIL)
        return RankReport(
            self._bundle.progress,
            reference.mode,
            str(policy.device),
            policy.parameter_counts,
            self._bundle.notes,
        )

    def _build_reference(self, handle: ReferenceHandle, first_step: int) -> ReferenceBundle:  # noqa: ARG002
        """Build the reference: read from the cache, or in this process. Ray's workers may have another one."""
        config, inputs, policy = self._config, self._inputs, self._policy
        if handle.mode != "precompute":
            return build_reference_bundle(config, inputs, policy, device=policy.device, weights=handle.weights)
        splits = cached_splits(config, inputs, str(handle.weights), policy.device)
        return bundle_of(config, handle, *splits)

    def score_missing(self, weights: str) -> Iterator[ScoringProgress]:
        """Score the blocks of this rank with the reference on the policy's axes, then free it."""
        set_activity("loading the reference")
        config, inputs, policy = self._config, self._inputs, self._policy
        world = policy.dp_group.world
        reference = build_checked_reference(config, inputs, device=policy.device, world=world, role=config.actor_train)
        yield from score_missing_blocks(config, inputs, reference, weights, policy.device)

    def score_missing_quietly(self, weights: str) -> None:
        deque(self.score_missing(weights), maxlen=0)

    def begin(self, seconds_per_pair: float | None) -> None:
        """Run the step-0 check; seconds_per_pair is the cost of precomputing reference logps, None without it."""
        if seconds_per_pair is not None:
            refresh_lookup(self._bundle.reference, self._config, seconds_per_pair)
        set_activity("checking the policy against the reference")
        self._bundle.begin()

    def run(self, until: int) -> Iterator[Record]:
        """Train up to a step, yielding the records to log."""
        yield from self._bundle.trainer.run(until)

    def run_quietly(self, until: int) -> None:
        """Train up to a step without records; rank 0 yields the metrics of all ranks."""
        deque(self._bundle.trainer.run(until), maxlen=0)

    def training_step(self) -> Metrics:
        """Make the next step of the plan, for use by hand; return the metrics of all ranks."""
        return self._bundle.trainer.training_step()

    def evaluate(self) -> dict[str, float]:
        """Evaluate without keeping the result, for use by hand."""
        return self._bundle.trainer.evaluate()

    def stopped_at(self) -> int | None:
        return self._bundle.trainer.stopped_at

    def evaluate_and_record(self) -> Iterator[EvaluationRecord]:
        """Evaluate, yielding the progress and then the metrics."""
        yield from self._bundle.trainer.evaluate_and_record()

    def evaluate_quietly(self) -> None:
        deque(self._bundle.trainer.evaluate_and_record(), maxlen=0)

    def save(self) -> None:
        self._bundle.trainer.save()

    def wait_for_saves(self) -> None:
        self._bundle.trainer.wait_for_saves()

    def trace(self) -> list[TraceSpan]:
        """Return the training time of each step."""
        return list(self._bundle.trainer.trace)


def bundle_of(
    config: DPOConfig, handle: ReferenceHandle, train: ReferenceScorer, validation: ReferenceScorer | None
) -> ReferenceBundle:
    """Describe a reference whose logps come from the cache or from other processes."""
    forwards: Forwards = "other batches" if handle.on_policy_axes else "other axes"
    return ReferenceBundle(handle.mode, train, validation, handle.weights, same_initial_weights(config), forwards)


def cached_splits(
    config: DPOConfig, inputs: RunInputs, weights: str, device: torch.device
) -> tuple[PrecomputedReference, PrecomputedReference | None]:
    """Look up the pairs of the run in the cache, in the driver, reference workers and policy ranks alike."""
    return look_up_splits(config, inputs, open_cache(config, weights), device)


def refresh_lookup(reference: ReferenceBundle, config: DPOConfig, seconds_per_pair: float) -> None:
    """Repeat the lookup after other processes filled the cache."""
    for split in (reference.train, reference.validation):
        if isinstance(split, PrecomputedReference):
            split.lookup()
            if split.num_missing:
                raise UserError(
                    f"reference workers scored {split.num_missing} pairs that a policy worker cannot find in "
                    f"{cache_root(config.reference_cache_dir)}; set reference.cache_dir to a directory that all "
                    "nodes share"
                )
            split.seconds_per_pair = seconds_per_pair


def score_missing_blocks(
    config: DPOConfig, inputs: RunInputs, reference: InferStrategy, weights: str, device: torch.device
) -> Iterator[ScoringProgress]:
    """Score this rank's blocks that are missing in the cache; yield the progress every few seconds."""
    train, validation = cached_splits(config, inputs, weights, device)
    shown = time.monotonic()
    for what, split in (("training", train), ("validation", validation)):
        if split is None:
            continue
        for done, total in split.iter_score_missing(reference.score, dp_group=reference.dp_group):
            set_activity(f"scoring {what} pairs, block {done + 1} of {total}")
            if done == total or time.monotonic() - shown > _PROGRESS_INTERVAL:
                shown = time.monotonic()
                yield what, done, total
