"""Worker processes of a cluster: ActorWorker is one rank of the policy, ReferenceWorker scores pairs for the policy."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import psutil
import ray
import torch
from torch._C._distributed_c10d import TCPStore

from thresher.builders.checked_engines import build_checked_reference
from thresher.builders.inputs import RunInputs, build_eval_batching, build_micro_batching
from thresher.builders.reference import ReferenceBundle
from thresher.config import DPOConfig
from thresher.data.batching.batches import MicroBatching
from thresher.data.batching.plan import PairIds
from thresher.data.store.reader import PairStore
from thresher.distributed.groups import Group
from thresher.losses.pairs import ChosenRejectedLogps
from thresher.observability.heartbeat import (
    Heartbeat,
    end_activity,
    heartbeat,
    pace_after,
    report_progress,
    set_activity,
)
from thresher.observability.throughput import NUM_SPANS, TraceSpan
from thresher.runtime.devices import CPU, claim_gpu
from thresher.runtime.rank import (
    LoadedPolicy,
    PolicyRank,
    Rank,
    ReferenceHandle,
    ScoringProgress,
    score_missing_blocks,
)
from thresher.runtime.ray import IMPORT_STARTED_AT
from thresher.runtime.ray.heartbeat_monitor import HEARTBEAT_GROUP
from thresher.runtime.ray.logps_transport import FlatLogps, pack_logps
from thresher.runtime.ray.remote_reference import prefetch_reference
from thresher.runtime.ray.rendezvous import Address, init_process_group, start_rendezvous
from thresher.runtime.ray.spares import WorkerProcess
from thresher.runtime.ray.starter import VISIBLE_DEVICES
from thresher.strategies.strategy import InferStrategy
from thresher.training.trainer import evaluation_batches

logger = logging.getLogger(__name__)

# a process that Ray has asked to end does so at once, unless it is stopped
_SECONDS_TO_EXIT, _SECONDS_TO_DIE = 2.0, 10.0


class Worker(Rank):
    """A process of a role as a Ray actor. Roles with collectives join a process group first.

    Until `claim_device`, it may be a spare: it has imported its code, and holds neither a device nor data.
    """

    def __init__(self, rank: int, size: int, threads: int, directory: str):
        torch.set_num_threads(threads)
        with contextlib.suppress(FileNotFoundError):
            os.chdir(directory)  # relative paths mean the same as in the driver
        super().__init__(rank, size, CPU)
        self._store: TCPStore | None = None
        self._import_seconds = time.time() - IMPORT_STARTED_AT

    def warm_up(self, modules: Sequence[str]) -> None:
        """Import what a running worker has imported; engines import much of it only when they load a model."""
        set_activity("waiting as a spare")
        for name in modules:
            with contextlib.suppress(Exception):  # optional; a worker that needs it reports the error
                importlib.import_module(name)

    def await_exit(self, processes: Sequence[tuple[int, float]]) -> None:
        """Wait until processes of this node, given by pid and start time, have ended; end those that are stopped."""
        found = [each for each in (_find_process(*each) for each in processes) if each is not None]
        _, late = psutil.wait_procs(found, timeout=_SECONDS_TO_EXIT)
        for process in late:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        if psutil.wait_procs(late, timeout=_SECONDS_TO_DIE)[1]:
            raise TimeoutError("a process of the previous attempt does not end")

    def claim_device(self, role: str, log_dir: Path, uses_gpu: bool) -> WorkerProcess:
        """Use the GPU that Ray assigned to this worker, or raise if torch cannot; without uses_gpu, the CPU."""
        if uses_gpu:
            # Ray hides the other GPUs unless RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES is set; a spare has no GPU in
            # Ray's books, and starts with the variable
            if assigned := ray.get_runtime_context().get_accelerator_ids().get("GPU"):
                os.environ[VISIBLE_DEVICES] = ",".join(assigned)
            self._device = claim_gpu(f"{role} worker {self._rank} of {self._size}", 0)
        self._prepare_device(role, log_dir)
        visible = os.environ.get(VISIBLE_DEVICES, "") if uses_gpu else None
        return WorkerProcess(os.getpid(), psutil.Process().create_time(), visible, self._import_seconds)

    def start_rendezvous(self) -> Address:
        """Host the rendezvous of all ranks; return its address."""
        self._store, address = start_rendezvous(self._size)
        return address

    @ray.method(concurrency_group=HEARTBEAT_GROUP)  # type: ignore[untyped-decorator]
    def heartbeat(self) -> Heartbeat:
        """Return the current activity; runs in a separate thread, so it replies while the worker is busy."""
        return heartbeat()

    @ray.method(concurrency_group=HEARTBEAT_GROUP)  # type: ignore[untyped-decorator]
    def imported_modules(self) -> list[str]:
        """List the modules of this process, in the order of their import."""
        return list(sys.modules)

    @ray.method(concurrency_group=HEARTBEAT_GROUP)  # type: ignore[untyped-decorator]
    def report_stall(self) -> None:
        """Log the stacks of this process; runs in a separate thread, so it works while the worker hangs."""
        self.log_stacks()

    def join(self, address: Address) -> None:
        set_activity("joining the process group")
        self._world = init_process_group(self._rank, self._size, address, self._store, self._device)


class ActorWorker(Worker, PolicyRank):
    """One rank of the policy; its reference may have workers of its own."""

    def _build_reference(self, handle: ReferenceHandle, first_step: int) -> ReferenceBundle:
        if handle.mode == "precompute" or not handle.workers:
            return super()._build_reference(handle, first_step)
        return prefetch_reference(self._config, self._inputs, self._policy, handle, first_step)


class ReferenceWorker(Worker):
    """A copy or a shard of the frozen model, which scores pairs into the cache or for upcoming steps."""

    _config: DPOConfig
    _inputs: RunInputs
    _reference: InferStrategy
    _micro_batching: MicroBatching
    _num_ranks: int

    def __init__(self, rank: int, size: int, threads: int, directory: str):
        super().__init__(rank, size, threads, directory)
        self._recent: dict[tuple[int, int], FlatLogps] = {}
        self._spans: deque[TraceSpan] = deque(maxlen=NUM_SPANS)
        self._num_scored = 0

    def load(self, config: DPOConfig, inputs: RunInputs) -> None:
        """Load the reference and check it on real pairs."""
        set_activity("loading the reference")
        self._config, self._inputs = config, inputs
        # replicas without a process group divide the blocks by rank and size alone
        world = self._world if self._world.group is not None else Group(self._rank, self._size)
        self._reference = build_checked_reference(config, inputs, device=self._device, world=world)
        logger.info("loaded the reference on %s", self._device)

    def score_missing(self, weights: str) -> Iterator[ScoringProgress]:
        """Score this worker's blocks that are missing in the cache."""
        yield from score_missing_blocks(self._config, self._inputs, self._reference, weights, self._device)

    def score_missing_quietly(self, weights: str) -> None:
        deque(self.score_missing(weights), maxlen=0)

    def serve(self, policy: LoadedPolicy, num_ranks: int) -> None:
        """Prepare to score steps, with the same micro-batches as the policy."""
        self._inputs = replace(self._inputs, layout=policy.layout)
        self._micro_batching = build_micro_batching(self._config, self._inputs, policy.hidden_size)
        self._num_ranks = num_ranks
        self._recent.clear()  # of a previous run

    def score_step(self, step: int, rank: int) -> FlatLogps:
        """Score the micro-batches of a data rank in a step; all processes of the rank request the same."""
        if (step, rank) in self._recent:
            return self._recent[step, rank]
        set_activity(f"scoring step {step + 1} for rank {rank}", pace_after(self._num_scored))
        started = time.time()
        batches = self._micro_batching.split(self._inputs.plan.pair_ids(step), rank, self._num_ranks)
        flat = pack_logps([self._score(self._inputs.train, ids) for ids in batches])
        end_activity()
        self._num_scored += 1
        self._spans.append(TraceSpan("reference", step, started, time.time()))
        self._recent[step, rank] = flat
        if len(self._recent) > self._num_ranks * self._config.reference.prefetch_steps:
            del self._recent[next(iter(self._recent))]
        return flat

    def score_validation(self, batch: int, rank: int) -> FlatLogps:
        """Score an evaluation batch of a data rank."""
        store = self._inputs.validation
        if store is None:
            raise ValueError("there are no validation pairs to score")
        set_activity(f"scoring validation batch {batch + 1} for rank {rank}")
        batching = build_eval_batching(self._config, self._inputs)
        ids = evaluation_batches(store.lengths, batching, rank, self._num_ranks)[batch]
        return pack_logps([self._score(store, ids)])

    def trace(self) -> list[TraceSpan]:
        """Return the scoring time of each step."""
        return list(self._spans)

    def _score(self, store: PairStore, ids: PairIds) -> ChosenRejectedLogps:
        logps = self._reference.score(store.read(ids))
        report_progress()
        return logps


def _find_process(pid: int, started: float) -> psutil.Process | None:
    """Return a running process of this node; None if it has ended, even if its pid is used again."""
    try:
        process = psutil.Process(pid)
        is_running = process.create_time() == started and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return None
    return process if is_running else None
