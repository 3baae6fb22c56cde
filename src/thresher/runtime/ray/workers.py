"""The processes of a cluster: ActorWorker is one rank of the policy, ReferenceWorker scores for all of them."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import ray
import torch
from torch._C._distributed_c10d import TCPStore

from thresher.builders.data import probe_pairs
from thresher.builders.engines import build_policy, build_reference
from thresher.builders.inputs import RunInputs, build_micro_batching
from thresher.builders.trainer import TrainerBundle, build_trainer, check_policy
from thresher.checkpoint.manifest import read_manifest
from thresher.config import DPOConfig
from thresher.data.batching.micro_batches import MicroBatching
from thresher.data.batching.plan import PairIds
from thresher.data.store.reader import PairStore
from thresher.distributed.groups import SINGLE_PROCESS, Group
from thresher.losses.pairs import ChosenRejectedLogps
from thresher.observability.heartbeat import Heartbeat, heartbeat, set_activity
from thresher.observability.run_log import LogFile, open_worker_log
from thresher.observability.throughput import NUM_SPANS, TraceSpan
from thresher.runtime.ray.heartbeat_monitor import HEARTBEAT_GROUP
from thresher.runtime.ray.logps_transport import FlatLogps, pack_logps
from thresher.runtime.ray.remote_reference import ReferenceHandle, build_worker_reference, cached_splits, refresh_lookup
from thresher.runtime.ray.rendezvous import Address, init_process_group, start_rendezvous
from thresher.strategies.native.infer import NativeInfer
from thresher.strategies.native.train import NativeTrain
from thresher.training.loop import TrainingProgress
from thresher.training.trainer import Record, evaluation_batches

logger = logging.getLogger(__name__)

_SECONDS_BETWEEN_NEWS = 2.0


@dataclass(frozen=True)
class RankReport:
    """What a rank of the policy says before its first step."""

    standing: TrainingProgress
    reference_mode: str
    device: str
    node_id: str
    notes: tuple[str, ...]


class Worker:
    """A process of a role. Those that compute together meet and join a group first."""

    def __init__(self, rank: int, size: int, threads: int, directory: str):
        start_process(threads, directory)
        self._rank, self._size = rank, size
        self._meeting: TCPStore | None = None
        self._world = SINGLE_PROCESS
        self._log: LogFile | None = None

    def open_log(self, directory: Path, role: str, level: int) -> str | None:
        """Log to this worker's own file of a run from now on; return why that is not possible, if it is not."""
        if self._log is not None:  # of the run before
            logging.getLogger("thresher").removeHandler(self._log)
            self._log.close()
            self._log = None
        try:
            self._log = open_worker_log(directory, role, self._rank, level)
        except OSError as error:
            return f"no log of {role} workers on {socket.gethostname()}: {error}"
        logger.info("worker %d of %d, process %d on %s", self._rank, self._size, os.getpid(), socket.gethostname())
        return None

    def start_rendezvous(self) -> Address:
        """Open the address at which all ranks meet."""
        self._meeting, address = start_rendezvous(self._size)
        return address

    @ray.method(concurrency_group=HEARTBEAT_GROUP)  # type: ignore[untyped-decorator]
    def heartbeat(self) -> Heartbeat:
        """Tell what this process does; answered while it does it."""
        return heartbeat()

    def join(self, address: Address) -> None:
        set_activity("meeting the other workers")
        self._world = init_process_group(self._rank, self._size, address, self._meeting)


class ActorWorker(Worker):
    """One process of the policy: its trainer, built by the same functions as in one process, and called from afar."""

    def __init__(self, rank: int, size: int, threads: int, directory: str):
        super().__init__(rank, size, threads, directory)
        self._config: DPOConfig
        self._inputs: RunInputs
        self._policy: NativeTrain
        self._parts: TrainerBundle

    def load(self, config: DPOConfig, inputs: RunInputs) -> int:
        """Load the policy and check it on real pairs; return its hidden size, which decides how steps are cut."""
        set_activity("loading the policy")
        self._config, self._inputs = config, inputs
        self._policy = build_policy(config, inputs.layout, device=own_device(), world=self._world)
        check_policy(config, inputs, self._policy)
        logger.info("loaded the policy on %s", self._policy.device)
        return self._policy.hidden_size

    def build(self, checkpoint: Path | None, link: ReferenceHandle) -> RankReport:
        """Make the trainer, and go on from a checkpoint where there is one."""
        set_activity("building the trainer" if checkpoint is None else f"reading {checkpoint.name}")
        config, inputs, policy = self._config, self._inputs, self._policy
        first_step = 0 if checkpoint is None else read_manifest(checkpoint).step
        reference = build_worker_reference(config, inputs, policy, link, first_step)
        self._parts = build_trainer(config, inputs, policy, reference, checkpoint)
        logger.info("ready at step %d of %d", self._parts.progress.step, inputs.plan.num_steps)
        node_id = ray.get_runtime_context().get_node_id()
        return RankReport(self._parts.progress, reference.mode, str(policy.device), node_id, self._parts.notes)

    def begin(self, seconds_per_pair: float | None) -> None:
        """Check step 0; seconds_per_pair is what reference workers spent in advance, None where they did nothing."""
        if seconds_per_pair is not None:
            refresh_lookup(self._parts.reference, self._config, seconds_per_pair)
        set_activity("checking that the policy starts as the reference")
        self._parts.begin()

    def run(self, until: int) -> Iterator[Record]:
        """Train up to a step, yielding what is to be logged."""
        yield from self._parts.trainer.run(until)

    def follow(self, until: int) -> None:
        """Train up to a step; rank 0 tells the metrics, which are those of all ranks."""
        deque(self._parts.trainer.run(until), maxlen=0)

    def stopped_at(self) -> int | None:
        return self._parts.trainer.stopped_at

    def evaluate_and_record(self) -> dict[str, float]:
        return self._parts.trainer.evaluate_and_record()

    def save(self) -> None:
        self._parts.trainer.save()

    def wait_for_saves(self) -> None:
        self._parts.trainer.wait_for_saves()

    def trace(self) -> list[TraceSpan]:
        """When this rank trained, step by step."""
        return list(self._parts.trainer.trace)


class ReferenceWorker(Worker):
    """A copy of the frozen model, or a part of one, that scores into the cache, or the shares of coming steps."""

    def __init__(self, rank: int, size: int, threads: int, directory: str):
        super().__init__(rank, size, threads, directory)
        self._recent: dict[tuple[int, int], FlatLogps] = {}
        self._spans: deque[TraceSpan] = deque(maxlen=NUM_SPANS)
        self._config: DPOConfig
        self._inputs: RunInputs
        self._reference: NativeInfer
        self._micro_batching: MicroBatching
        self._num_ranks: int

    def load(self, config: DPOConfig, inputs: RunInputs) -> None:
        """Load the reference and check it on real pairs."""
        set_activity("loading the reference")
        self._config, self._inputs = config, inputs
        # copies that join no group deal the blocks by their numbers alone
        world = self._world if self._world.group is not None else Group(self._rank, self._size)
        self._reference = build_reference(config, inputs.layout, device=own_device(), world=world)
        self._reference.check_logps(probe_pairs(inputs.train))
        logger.info("loaded the reference on %s", own_device())

    def score_missing(self, weights: str) -> Iterator[tuple[str, int, int]]:
        """Score this worker's share of the blocks that the cache lacks; yield (what, done, total) now and then."""
        train, validation = cached_splits(self._config, self._inputs, weights, own_device())
        shown = time.monotonic()
        for what, split in (("training", train), ("held-out", validation)):
            if split is None:
                continue
            for done, total in split.iter_score_missing(self._reference.score, ranks=self._reference.dp_group):
                set_activity(f"scoring {what} pairs, block {done + 1} of {total}")
                if done == total or time.monotonic() - shown > _SECONDS_BETWEEN_NEWS:
                    shown = time.monotonic()
                    yield what, done, total

    def score_missing_quietly(self, weights: str) -> None:
        deque(self.score_missing(weights), maxlen=0)

    def serve(self, policy_hidden_size: int, num_ranks: int) -> None:
        """Learn how the policy cuts its steps, so that both derive the same shares."""
        config, inputs = self._config, self._inputs
        self._micro_batching = build_micro_batching(config, inputs.layout, inputs.train, policy_hidden_size)
        self._num_ranks = num_ranks
        self._recent.clear()  # of another run, or of one that was cut otherwise

    def score_step(self, step: int, rank: int) -> FlatLogps:
        """Score a rank's share of a step; several processes of one rank ask for the same."""
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
        """Score one of a rank's evaluation batches."""
        store, size = self._inputs.validation, self._config.actor_train.training_args.pairs_per_eval_batch
        if store is None:
            raise ValueError("there are no held-out pairs to score")
        set_activity(f"scoring held-out batch {batch + 1} for rank {rank}")
        return pack_logps([self._score(store, evaluation_batches(len(store), size, rank, self._num_ranks)[batch])])

    def trace(self) -> list[TraceSpan]:
        """When this worker scored which step."""
        return list(self._spans)

    def _score(self, store: PairStore, ids: PairIds) -> ChosenRejectedLogps:
        return self._reference.score(store.read(ids))


def start_process(threads: int, directory: str) -> None:
    """Compute with so many threads, and read relative paths as the driver does, where its directory is here as well."""
    torch.set_num_threads(threads)
    with contextlib.suppress(FileNotFoundError):
        os.chdir(directory)


def own_device() -> torch.device:
    """Ray shows a worker the one GPU that it may use; where there is none, or torch cannot reach it, it is the CPU."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
