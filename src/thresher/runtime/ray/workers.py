"""Worker processes of a cluster: ActorWorker is one rank of the policy, ReferenceWorker scores pairs for the policy."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import socket
import time
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import ray
import torch
from torch._C._distributed_c10d import TCPStore

from thresher.builders.checked_engines import build_checked_policy, build_checked_reference
from thresher.builders.inputs import RunInputs, build_micro_batching
from thresher.builders.trainer import TrainerBundle, build_trainer
from thresher.checkpoint.manifest import read_manifest
from thresher.config import DPOConfig
from thresher.data.batching.micro_batches import MicroBatching
from thresher.data.batching.plan import PairIds
from thresher.data.store.reader import PairStore
from thresher.distributed.groups import SINGLE_PROCESS, Group
from thresher.losses.pairs import ChosenRejectedLogps
from thresher.models.layouts import Layout
from thresher.observability.heartbeat import Heartbeat, heartbeat, set_activity
from thresher.observability.run_log import LogFile, open_worker_log
from thresher.observability.throughput import NUM_SPANS, TraceSpan
from thresher.redact import redact
from thresher.runtime.ray.heartbeat_monitor import HEARTBEAT_GROUP
from thresher.runtime.ray.logps_transport import FlatLogps, pack_logps
from thresher.runtime.ray.remote_reference import ReferenceHandle, build_worker_reference, cached_splits, refresh_lookup
from thresher.runtime.ray.rendezvous import Address, init_process_group, start_rendezvous
from thresher.strategies.native.infer import NativeInfer
from thresher.strategies.native.parameters import ParameterCounts
from thresher.strategies.native.train import NativeTrain
from thresher.training.loop import TrainingProgress
from thresher.training.trainer import EvaluationRecord, Record, evaluation_batches

logger = logging.getLogger(__name__)

_PROGRESS_INTERVAL = 2.0  # seconds
ScoringProgress = tuple[str, int, int]  # split, blocks done, blocks of this rank


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
    node_id: str
    notes: tuple[str, ...]


class Worker:
    """A process of a role. Roles with collectives join a process group first."""

    def __init__(self, rank: int, size: int, threads: int, directory: str):
        torch.set_num_threads(threads)
        with contextlib.suppress(FileNotFoundError):
            os.chdir(directory)  # relative paths mean the same as in the driver
        self._rank, self._size = rank, size
        self._store: TCPStore | None = None
        self._world = SINGLE_PROCESS
        self._log: LogFile | None = None

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
        if environment:  # as this process has it
            shown = redact({name: os.environ.get(name) for name in environment})
            logger.info("environment: %s", ", ".join(f"{name}={value}" for name, value in shown.items()))
        return None

    def start_rendezvous(self) -> Address:
        """Host the rendezvous of all ranks; return its address."""
        self._store, address = start_rendezvous(self._size)
        return address

    @ray.method(concurrency_group=HEARTBEAT_GROUP)  # type: ignore[untyped-decorator]
    def heartbeat(self) -> Heartbeat:
        """Return the current activity; runs in a separate thread, so it replies while the worker is busy."""
        return heartbeat()

    def join(self, address: Address) -> None:
        set_activity("joining the process group")
        self._world = init_process_group(self._rank, self._size, address, self._store)


class ActorWorker(Worker):
    """One process of the policy. Its trainer is built by the same functions as in a run without Ray."""

    _config: DPOConfig
    _inputs: RunInputs
    _policy: NativeTrain
    _bundle: TrainerBundle

    def load(self, config: DPOConfig, inputs: RunInputs) -> LoadedPolicy:
        """Load the policy and check it on real pairs."""
        set_activity("loading the policy")
        checked = build_checked_policy(config, inputs, device=local_device(), world=self._world)
        self._config, self._inputs, self._policy = config, checked.inputs, checked.policy
        logger.info("loaded the policy on %s", self._policy.device)
        return LoadedPolicy(self._policy.hidden_size, checked.inputs.layout, checked.notes)

    def build(self, checkpoint: Path | None, handle: ReferenceHandle) -> RankReport:
        """Build the trainer, and restore a checkpoint if there is one."""
        set_activity("building the trainer" if checkpoint is None else f"reading {checkpoint.name}")
        config, inputs, policy = self._config, self._inputs, self._policy
        first_step = 0 if checkpoint is None else read_manifest(checkpoint).step
        reference = build_worker_reference(config, inputs, policy, handle, first_step)
        self._bundle = build_trainer(config, inputs, policy, reference, checkpoint)
        logger.info("ready at step %d of %d", self._bundle.progress.step, inputs.plan.num_steps)
        node_id = ray.get_runtime_context().get_node_id()
        return RankReport(
            self._bundle.progress,
            reference.mode,
            str(policy.device),
            policy.parameter_counts,
            node_id,
            self._bundle.notes,
        )

    def score_missing(self, weights: str) -> Iterator[ScoringProgress]:
        """Score the blocks of this rank with the reference on the policy's axes, then free it."""
        set_activity("loading the reference")
        config, inputs, policy = self._config, self._inputs, self._policy
        world = policy.dp_group.world
        reference = build_checked_reference(config, inputs, device=policy.device, world=world, role=config.actor_train)
        yield from _score_missing(config, inputs, reference, weights)

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


class ReferenceWorker(Worker):
    """A copy or a shard of the frozen model, which scores pairs into the cache or for upcoming steps."""

    _config: DPOConfig
    _inputs: RunInputs
    _reference: NativeInfer
    _micro_batching: MicroBatching
    _num_ranks: int

    def __init__(self, rank: int, size: int, threads: int, directory: str):
        super().__init__(rank, size, threads, directory)
        self._recent: dict[tuple[int, int], FlatLogps] = {}
        self._spans: deque[TraceSpan] = deque(maxlen=NUM_SPANS)

    def load(self, config: DPOConfig, inputs: RunInputs) -> None:
        """Load the reference and check it on real pairs."""
        set_activity("loading the reference")
        self._config, self._inputs = config, inputs
        # replicas without a process group divide the blocks by rank and size alone
        world = self._world if self._world.group is not None else Group(self._rank, self._size)
        self._reference = build_checked_reference(config, inputs, device=local_device(), world=world)
        logger.info("loaded the reference on %s", local_device())

    def score_missing(self, weights: str) -> Iterator[ScoringProgress]:
        """Score this worker's blocks that are missing in the cache."""
        yield from _score_missing(self._config, self._inputs, self._reference, weights)

    def score_missing_quietly(self, weights: str) -> None:
        deque(self.score_missing(weights), maxlen=0)

    def serve(self, policy: LoadedPolicy, num_ranks: int) -> None:
        """Prepare to score steps, with the same micro-batches as the policy."""
        config, train = self._config, self._inputs.train
        self._micro_batching = build_micro_batching(config, policy.layout, train, policy.hidden_size)
        self._num_ranks = num_ranks
        self._recent.clear()  # of a previous run

    def score_step(self, step: int, rank: int) -> FlatLogps:
        """Score the micro-batches of a data rank in a step; all processes of the rank request the same."""
        if (step, rank) in self._recent:
            return self._recent[step, rank]
        set_activity(f"scoring step {step + 1} for rank {rank}")
        started = time.time()
        batches = self._micro_batching.split(self._inputs.plan.pair_ids(step), rank, self._num_ranks)
        flat = pack_logps([self._score(self._inputs.train, ids) for ids in batches])
        self._spans.append(TraceSpan("reference", step, started, time.time()))
        self._recent[step, rank] = flat
        if len(self._recent) > self._num_ranks * self._config.reference.prefetch_steps:
            del self._recent[next(iter(self._recent))]
        return flat

    def score_validation(self, batch: int, rank: int) -> FlatLogps:
        """Score an evaluation batch of a data rank."""
        store, size = self._inputs.validation, self._config.actor_train.training_args.pairs_per_eval_batch
        if store is None:
            raise ValueError("there are no validation pairs to score")
        set_activity(f"scoring validation batch {batch + 1} for rank {rank}")
        return pack_logps([self._score(store, evaluation_batches(len(store), size, rank, self._num_ranks)[batch])])

    def trace(self) -> list[TraceSpan]:
        """Return the scoring time of each step."""
        return list(self._spans)

    def _score(self, store: PairStore, ids: PairIds) -> ChosenRejectedLogps:
        return self._reference.score(store.read(ids))


def _score_missing(
    config: DPOConfig, inputs: RunInputs, reference: NativeInfer, weights: str
) -> Iterator[ScoringProgress]:
    """Score this rank's blocks that are missing in the cache; yield the progress every few seconds."""
    train, validation = cached_splits(config, inputs, weights, local_device())
    shown = time.monotonic()
    for what, split in (("training", train), ("validation", validation)):
        if split is None:
            continue
        for done, total in split.iter_score_missing(reference.score, dp_group=reference.dp_group):
            set_activity(f"scoring {what} pairs, block {done + 1} of {total}")
            if done == total or time.monotonic() - shown > _PROGRESS_INTERVAL:
                shown = time.monotonic()
                yield what, done, total


def local_device() -> torch.device:
    """Return the one GPU that Ray makes visible to this worker; the CPU if there is none or torch cannot use it."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
