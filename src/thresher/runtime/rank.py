"""The processes of a role, independent of what starts them: `PolicyRank` is one rank of the policy.

A run in one process has one, and calls its methods in place. Ray calls them as an actor's methods; under torchrun and
srun, rank 0 calls its own and requests the same calls of the other ranks.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import socket
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch

from thresher import durable
from thresher.builders.checked_engines import build_checked_policy
from thresher.builders.hardware import Hardware, gpu_of
from thresher.builders.inputs import RunInputs
from thresher.builders.reference import FoundSplits, ScoringProgress, build_beside, open_reference, score_missing
from thresher.builders.trainer import build_trainer, resume
from thresher.checkpoint.manifest import find_damage, read_manifest
from thresher.checkpoint.state import capture_rng, restore_rng
from thresher.config import DPOConfig
from thresher.distributed.groups import SINGLE_PROCESS, Metrics
from thresher.engines.engine import TrainEngine
from thresher.models.layouts import Layout
from thresher.observability.details import DETAIL
from thresher.observability.heartbeat import heartbeat, set_activity
from thresher.observability.run_log import WORKERS, LogFile, open_worker_log
from thresher.observability.timing import TraceSpan
from thresher.redact import redact
from thresher.reference.scorers import Reference
from thresher.reference.step_zero_check import check_step_zero
from thresher.runtime.devices import prepare_cuda, raise_descriptor_limit, use_compile_cache
from thresher.training.trainer import EvaluationRecord, RankTrainer, Record

logger = logging.getLogger(__name__)


class Rank:
    """A process of a role, with a log file."""

    config: DPOConfig

    def __init__(self, rank: int, size: int, device: torch.device):
        self._rank, self._size, self._device = rank, size, device
        self._world = SINGLE_PROCESS
        self._log: LogFile | None = None
        self._dump_prefix: Path | None = None
        self._device_notes: list[str] = []
        self.is_open = False  # until it has a config

    def _prepare_device(self, role: str, log_dir: Path) -> None:
        raise_descriptor_limit()
        self._dump_prefix = log_dir / WORKERS / f"{role}-nccl-"
        self._device_notes = [f"device: {self._device}", *prepare_cuda(self._device, self._dump_prefix)]

    def log_stacks(self) -> None:
        """Write the stacks of all threads to the log, and NCCL's last collectives next to it."""
        if self._log is not None:
            logger.warning("no worker makes progress; %s; stacks of this one:", heartbeat().activity)
            faulthandler.dump_traceback(self._log.stream)
        if self._device.type == "cuda" and self._dump_prefix is not None:
            path = self._dump_prefix.with_name(f"{self._dump_prefix.name}{self._rank}")
            # in the format of torch.distributed.flight_recorder; builds with NCCL have the function
            record = torch._C._distributed_c10d._dump_nccl_trace()  # type: ignore[attr-defined]
            durable.replace(path, record)  # never through a symlink

    def open_log(self, directory: Path, role: str, level: int, environment: Collection[str] = ()) -> str | None:
        """Log to this worker's file in a run directory; return a warning if it cannot be opened."""
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
        if environment:  # the variables that the config sets for this role, as this process has them
            shown = redact({name: os.environ.get(name) for name in environment})
            logger.info("environment: %s", ", ".join(f"{name}={value}" for name, value in shown.items()))
        return None


class PolicyRank(Rank):
    """One process of the policy."""

    reference: Reference
    trainer: RankTrainer
    _inputs: RunInputs
    _policy: TrainEngine
    _notes: tuple[str, ...]

    def open(self, config: DPOConfig, log_dir: Path) -> None:
        """Take the config of a run, and prepare the device."""
        self.config, self.is_open = config, True
        self._prepare_device("actor_train", log_dir)
        for note in (*self._device_notes, use_compile_cache(config.cache_dir)):
            logger.info("%s", note, extra=DETAIL)

    def smallest_gpu(self) -> Hardware | None:
        """Find the GPU with least memory of all ranks; None if a rank has none."""
        gpus = self._world.all_gather_object(gpu_of(self._device))
        found = [gpu for gpu in gpus if gpu is not None]
        return min(found, key=lambda gpu: gpu.memory) if len(found) == len(gpus) else None

    def find_damage(self, checkpoint: Path) -> list[str]:
        """Hash this rank's part of the files of a checkpoint; return what all ranks have found."""
        set_activity(f"verifying {checkpoint.name}")
        return find_damage(checkpoint, self._world)

    def load(self, inputs: RunInputs) -> tuple[Layout, int]:
        """Load the policy and check it on real pairs; return the layout that it supports, and its hidden size."""
        set_activity("loading the policy")
        inputs = inputs.replace(config=self.config)
        self._policy, layout, self._notes = build_checked_policy(inputs, device=self._device, world=self._world)
        self._inputs = inputs.replace(layout=layout)
        logger.info("loaded the policy on %s", self._policy.device, extra=DETAIL)
        return layout, self._policy.hidden_size

    def build(
        self,
        checkpoint: Path | None,
        reference_workers: tuple[Any, ...] = (),
        found: FoundSplits | None = None,
    ) -> tuple[str, ...]:
        """Build the trainer, and restore a checkpoint if there is one; return warnings for the user.

        Args:
            reference_workers: what scores the reference.
            found: what the driver has found in the reference cache.
        """
        set_activity("building the trainer" if checkpoint is None else f"reading {checkpoint.name}")
        inputs, policy = self._inputs, self._policy
        first_step = 0 if checkpoint is None else read_manifest(checkpoint).step
        self.reference = self._open_reference(reference_workers, found, first_step)
        self.trainer = build_trainer(inputs, policy, self.reference)
        notes = [] if checkpoint is None else resume(self.trainer, self.config, checkpoint)
        logger.info("ready at step %d of %d", self.trainer.state.step, inputs.plan.num_steps, extra=DETAIL)
        return *self._notes, *notes

    def _open_reference(
        self,
        workers: tuple[Any, ...],  # noqa: ARG002
        found: FoundSplits | None,
        first_step: int,  # noqa: ARG002
    ) -> Reference:
        """Open the reference: from the cache, or in this process. Ray's workers may have a different one."""
        return open_reference(self._inputs, self._policy, found)

    def device(self) -> str:
        return str(self._policy.device)

    def step(self) -> int:
        return self.trainer.step

    def last_evaluation(self) -> dict[str, float]:
        return self.trainer.last_evaluation

    def count_cached(self) -> tuple[int, int]:
        """Count the run's pairs whose reference logps the cache has, and those that it lacks."""
        return self.reference.num_found, self.reference.num_missing

    def score_missing(self) -> Iterator[ScoringProgress]:
        """Score this rank's share of the pairs that the cache lacks, with the reference next to the policy; free it."""
        set_activity("loading the reference")
        rng = capture_rng() if self.trainer.state.step else None  # as the checkpoint has restored it
        yield from score_missing(self.reference.cached, build_beside(self._inputs, self._policy))
        if rng is not None:
            restore_rng(rng)

    def begin(self, seconds_per_pair: float | None) -> None:
        """Run the step-0 check; seconds_per_pair is the cost of precomputing reference logps, None without it."""
        self.reference.begin(seconds_per_pair)
        set_activity("checking the policy against the reference")
        trainer, reference = self.trainer, self.reference
        if trainer.state.step == 0 and reference.equals_policy and (first := trainer.first_micro_batch()) is not None:
            dtype = self.config.actor_train.model_args.dtype
            check_step_zero(trainer.engine, first, trainer.objective, dtype, reference.forwards)
        trainer.clock.restart()

    def run(self, until: int) -> Iterator[Record]:
        """Train up to a step, yielding the records to log."""
        yield from self.trainer.run(until)

    def training_step(self) -> Metrics:
        """Make the next step of the plan, for use by hand; return the metrics of all ranks."""
        return self.trainer.training_step()

    def evaluate(self) -> dict[str, float]:
        """Evaluate without keeping the result, for use by hand."""
        return self.trainer.evaluate()

    def stopped_at(self) -> int | None:
        return self.trainer.stopped_at

    def evaluate_and_record(self) -> Iterator[EvaluationRecord]:
        """Evaluate, yielding the progress and then the metrics."""
        yield from self.trainer.evaluate_and_record()

    def save(self) -> None:
        self.trainer.save()

    def wait_for_saves(self) -> None:
        self.trainer.wait_for_saves()

    def trace(self) -> list[TraceSpan]:
        """Return the training time of each step."""
        return list(self.trainer.trace)
