"""Memory of the ranks: bytes of parameters, gradients and optimizer, and growth while a model is loaded."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from benchmarks.resident import kilobytes
from tests.support.engines.parity import CPU, Case, load_parallel, make_policy, make_trainer, mesh_of
from thresher.distributed.mesh import ParallelDims
from thresher.engines.engine import TrainEngine
from thresher.engines.native.declaration import FSDP2Settings
from thresher.engines.native.parallelize import parallelize
from thresher.models.loading.load_sharded import build_on_meta


@dataclass(frozen=True)
class HeldBytes:
    parameters: int
    gradients: int
    optimizer: int


def held_after_a_step(case: Case, model_dir: Path) -> HeldBytes:
    """Count before zero_grad, when parameters, gradients and optimizer state all exist."""
    model, parallel = load_parallel(case, model_dir)
    policy = make_policy(case, model, parallel)
    trainer = make_trainer(policy, None, case)
    counted = count_before_zero_grad(policy)
    trainer.training_step()
    return counted[0]


def count_before_zero_grad(policy: TrainEngine) -> list[HeldBytes]:
    """Return a list that the next step of a policy fills."""
    model, counted = policy.model, list[HeldBytes]()
    zero_grad = policy.parameters.zero_grad

    def count_and_zero() -> None:
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        of_shards = [shard.grad for shard in policy.parameters.shards.values() if shard.grad is not None]
        moments = [value for state in policy.parameters.optimizer.state.values() for value in state.values()]
        counted.append(HeldBytes(_memory(model.parameters()), _memory([*gradients, *of_shards]), _memory(moments)))
        zero_grad()

    policy.parameters.zero_grad = count_and_zero
    return counted


def _memory(tensors: Iterable[Tensor]) -> int:
    """Bytes of the distinct storages behind some tensors; a view keeps its whole storage."""
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return sum({(s := t.untyped_storage()).data_ptr(): s.nbytes() for t in local if t.numel()}.values())


def load(sizes: ParallelDims, model_dir: Path) -> None:
    model = build_on_meta(str(model_dir), dtype=torch.float32)
    parallelize(model, str(model_dir), mesh_of(sizes), FSDP2Settings(), torch.float32, CPU)


def process_id(sizes: ParallelDims) -> int:
    """Also make the mesh, so that the next call only loads."""
    mesh_of(sizes)
    return os.getpid()


class PeakOfProcesses:
    """Peak private memory (RssAnon) of some processes within a `with` block, above the level before it.

    Sampled from outside about a thousand times per second, because copying weights blocks other threads. Pages of
    mapped files do not count: the kernel can reclaim them.
    """

    def __init__(self, process_ids: Sequence[int]):
        self._before = {pid: kilobytes("RssAnon", pid) for pid in process_ids}
        self._most = dict(self._before)
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> PeakOfProcesses:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    @property
    def growth(self) -> list[int]:
        """Bytes per process."""
        return [1024 * (self._most[pid] - before) for pid, before in self._before.items()]

    def _watch(self) -> None:
        while not self._done.is_set():
            for pid, most in self._most.items():
                self._most[pid] = max(most, kilobytes("RssAnon", pid))
            time.sleep(0.001)
