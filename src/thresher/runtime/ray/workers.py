"""Worker processes of a cluster: ActorWorker is one rank of the policy, ReferenceWorker scores pairs for the policy."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections import deque
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import ray
import torch
from torch._C._distributed_c10d import TCPStore

from thresher.builders.checked_engines import build_checked_reference
from thresher.builders.inputs import RunInputs, build_eval_batching, build_micro_batching
from thresher.builders.preflight.machine import check_node
from thresher.builders.reference import FoundSplits, ScoringProgress, look_up, score_missing
from thresher.config import DPOConfig
from thresher.data.batching.batches import MicroBatching
from thresher.data.batching.mismatched import Examples
from thresher.data.batching.plan import PairIds
from thresher.distributed.groups import Group
from thresher.engines.engine import Engine
from thresher.losses.pairs import ExampleLogps
from thresher.models.layouts import Layout
from thresher.observability.heartbeat import (
    Heartbeat,
    end_activity,
    heartbeat,
    pace_after,
    report_progress,
    set_activity,
)
from thresher.observability.machine import memory_metrics
from thresher.observability.timing import NUM_SPANS, TraceSpan
from thresher.observability.trackers.ray_metrics import Gauges, record_rank
from thresher.reference.scorers import Reference
from thresher.runtime.devices import CPU, claim_gpu, init_process_group, use_compile_cache
from thresher.runtime.rank import PolicyRank, Rank
from thresher.runtime.ray import IMPORT_STARTED_AT
from thresher.runtime.ray.fork_server import imported_modules
from thresher.runtime.ray.heartbeat_monitor import HEARTBEAT_GROUP
from thresher.runtime.ray.remote_reference import FlatSide, pack_logps, prefetch_reference
from thresher.training.trainer import Record, evaluation_batches

logger = logging.getLogger(__name__)

Address = tuple[str, int]


class Worker(Rank):
    """A process of a role as a Ray actor. Roles with collectives join a process group first."""

    def __init__(self, rank: int, size: int, threads: int, directory: str):
        torch.set_num_threads(threads)
        with contextlib.suppress(FileNotFoundError):
            os.chdir(directory)  # relative paths mean the same as in the driver
        super().__init__(rank, size, CPU)
        self._store: TCPStore | None = None
        self._gauges = Gauges()
        self._import_seconds = time.time() - IMPORT_STARTED_AT

    def claim_device(self, role: str, log_dir: Path, uses_gpu: bool) -> float:
        """Use the GPU that Ray assigned, or raise if torch cannot; return the seconds that the imports took."""
        if uses_gpu:
            # Ray hides the other GPUs unless RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES is set
            if assigned := ray.get_runtime_context().get_accelerator_ids().get("GPU"):
                os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(assigned)
            self._device = claim_gpu(f"{role} worker {self._rank} of {self._size}", 0)
        self._prepare_device(role, log_dir)
        return self._import_seconds

    @ray.method(concurrency_group=HEARTBEAT_GROUP)  # type: ignore[untyped-decorator]
    def imported_modules(self) -> list[str]:
        return imported_modules()

    def clock(self) -> float:
        """Return the time of this node, in seconds since the epoch."""
        return time.time()

    def take(self, config: DPOConfig, role: str, log_dir: Path, level: int, checking: Collection[int]) -> list[str]:
        """Take the config of a run, and log to its directory; return warnings.

        checking: the ranks that check their machine, one per node.
        """
        self.config, self.is_open = config, True
        self._gauges.start(run=config.exp_name, role=role, rank=str(self._rank))
        warning = self.open_log(log_dir, role, level, sorted(config.environment_of(role)))
        logger.info("%s", use_compile_cache(config.cache_dir))
        limits = check_node(config, uses_gpu=self._device.type == "cuda") if self._rank in checking else ()
        return [*([warning] if warning else []), *map(str, limits)]

    def drain(self, method: str, *arguments: object) -> None:
        """Run a generator method to its end; rank 0 yields the items of all ranks."""
        deque(getattr(self, method)(*arguments), maxlen=0)

    def start_rendezvous(self) -> Address:
        """Host a TCPStore for all ranks. The socket is bound here, so its port cannot be taken meanwhile."""
        host = ray.util.get_node_ip_address()
        listener = socket.create_server((host, 0), backlog=max(128, self._size))
        port, descriptor = listener.getsockname()[1], listener.detach()
        self._store = TCPStore(
            host, port, self._size, is_master=True, wait_for_workers=False, master_listen_fd=descriptor
        )
        return host, port

    @ray.method(concurrency_group=HEARTBEAT_GROUP)  # type: ignore[untyped-decorator]
    def heartbeat(self) -> Heartbeat:
        """Return the current activity; runs in a separate thread, so it replies while the worker is busy."""
        return heartbeat()

    @ray.method(concurrency_group=HEARTBEAT_GROUP)  # type: ignore[untyped-decorator]
    def report_stall(self) -> None:
        """Log the stacks of this process; runs in a separate thread, so it works while the worker hangs."""
        self.log_stacks()

    def join(self, address: Address) -> None:
        set_activity("joining the process group")
        host, port = address
        store = self._store or TCPStore(host, port, self._size, is_master=False)
        own_address = ray.util.get_node_ip_address()
        self._world = init_process_group(self._rank, self._size, store, own_address, self._device)


class ActorWorker(Worker, PolicyRank):
    """One rank of the policy; its reference may have its own workers."""

    def run(self, until: int) -> Iterator[Record]:
        for step, record in super().run(until):
            if isinstance(record, dict):
                record_rank(self._gauges, record)
            yield step, record

    def save(self) -> None:
        started = time.perf_counter()
        super().save()
        record_rank(self._gauges, {"time/save": time.perf_counter() - started})

    def _open_reference(self, workers: tuple[Any, ...], found: FoundSplits | None, first_step: int) -> Reference:
        if self._inputs.mode == "concurrent" and workers:
            return prefetch_reference(self._inputs, self._policy, workers, first_step)
        return super()._open_reference(workers, found, first_step)


class ReferenceWorker(Worker):
    """A copy or a shard of the frozen model, which scores pairs into the cache or for upcoming steps."""

    _inputs: RunInputs
    _found: FoundSplits | None
    _reference: Engine
    _micro_batching: MicroBatching
    _num_ranks: int

    def __init__(self, rank: int, size: int, threads: int, directory: str):
        super().__init__(rank, size, threads, directory)
        self._recent: dict[tuple[int, int], list[FlatSide]] = {}
        self._spans: deque[TraceSpan] = deque(maxlen=NUM_SPANS)
        self._num_scored = 0

    def load(self, inputs: RunInputs, found: FoundSplits | None = None) -> None:
        """Load the reference and check it on real pairs; found is what the driver has found in the cache."""
        set_activity("loading the reference")
        self._inputs, self._found = inputs.replace(config=self.config), found
        # replicas without a process group divide the blocks by rank and size alone
        world = self._world if self._world.group is not None else Group(self._rank, self._size)
        self._reference = build_checked_reference(self._inputs, device=self._device, world=world)
        logger.info("loaded the reference on %s", self._device)

    def score_missing(self) -> Iterator[ScoringProgress]:
        """Score this worker's blocks that are missing in the cache."""
        splits = look_up(self._inputs, self._device, group=self._reference.dp_group.world, found=self._found)
        yield from score_missing([split for split in splits if split is not None], self._reference)

    def serve(self, layout: Layout, hidden_size: int, num_ranks: int) -> None:
        """Prepare to score steps, with the same micro-batches as the policy."""
        self._inputs = self._inputs.replace(layout=layout)
        self._micro_batching = build_micro_batching(self._inputs, hidden_size)
        self._num_ranks = num_ranks
        self._recent.clear()  # of a previous run

    def score_step(self, step: int, rank: int) -> list[FlatSide]:
        """Score the micro-batches of a data rank in a step; all processes of the rank request the same."""
        if (step, rank) in self._recent:
            return self._recent[step, rank]
        set_activity(f"scoring step {step + 1} for rank {rank}", pace_after(self._num_scored))
        started = time.time()
        examples = self._inputs.train_examples
        batches = self._micro_batching.split(self._inputs.plan.pair_ids(step), rank, self._num_ranks)
        flat = pack_logps([self._score(examples, ids) for ids in batches])
        end_activity()
        self._num_scored += 1
        stopped = time.time()
        self._spans.append(TraceSpan("reference", step, started, stopped))
        record_rank(self._gauges, {"time/step": stopped - started, **memory_metrics()})
        self._recent[step, rank] = flat
        if len(self._recent) > self._num_ranks * self.config.reference.prefetch_steps:
            del self._recent[next(iter(self._recent))]
        return flat

    def score_validation(self, batch: int, rank: int) -> list[FlatSide]:
        """Score an evaluation batch of a data rank."""
        store = self._inputs.validation_examples
        if store is None:
            raise ValueError("there are no validation pairs to score")
        set_activity(f"scoring validation batch {batch + 1} for rank {rank}")
        batching = build_eval_batching(self._inputs)
        of_sets = evaluation_batches(store, batching, rank, self._num_ranks)
        batches = [ids for each in of_sets.values() for ids in each]
        return pack_logps([self._score(store, batches[batch])])

    def trace(self) -> list[TraceSpan]:
        return list(self._spans)

    def _score(self, store: Examples, ids: PairIds) -> ExampleLogps:
        logps = self._reference.score(store.read(ids))
        report_progress()
        return logps
