"""What the ranks of a policy hold, counted in each of them, and how much they grow while a model is loaded."""

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
from tests.support.strategies.parity import CPU, Case, make_policy, make_trainer, mesh_of, split_model
from thresher.distributed.mesh import ParallelDims
from thresher.models.loading.load_sharded import build_on_meta
from thresher.strategies.native.parallelize import parallelize


@dataclass(frozen=True)
class HeldBytes:
    parameters: int
    gradients: int
    optimizer: int


def held_after_a_step(case: Case, model_dir: Path) -> HeldBytes:
    """Count at the one moment when parameters, gradients and optimizer state are all there: before gradients go."""
    model, placement = split_model(case, model_dir)
    policy = make_policy(case, model, placement)
    trainer = make_trainer(policy, None, case)
    counted: list[HeldBytes] = []
    forget = policy._parameters.zero_grad

    def count_and_forget() -> None:
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        of_parts = [part.grad for part in policy._parameters.shards.values() if part.grad is not None]
        moments = [value for state in policy._optimizer.state.values() for value in state.values()]
        counted.append(HeldBytes(_memory(model.parameters()), _memory([*gradients, *of_parts]), _memory(moments)))
        forget()

    policy._parameters.zero_grad = count_and_forget
    trainer.training_step()
    return counted[0]


def _memory(tensors: Iterable[Tensor]) -> int:
    """Bytes behind some tensors, once where they share them: a view keeps all of what it is a view of."""
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return sum({(s := t.untyped_storage()).data_ptr(): s.nbytes() for t in local if t.numel()}.values())


def load(sizes: ParallelDims, model_dir: Path) -> None:
    model = build_on_meta(str(model_dir), dtype=torch.float32)
    parallelize(model, str(model_dir), mesh_of(sizes), torch.float32, CPU)


def process_id(sizes: ParallelDims) -> int:
    """Make the mesh as well: what comes after is the load alone."""
    mesh_of(sizes)
    return os.getpid()


class PeakOfProcesses:
    """The most private memory (RssAnon) of some processes within a `with` block, above what they had before it.

    Watched from outside, about a thousand times a second: whoever copies weights does not let other threads run. Pages
    of a mapped file do not count: they are the file's, and the kernel takes them back when it likes.
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
        """Bytes, of each process."""
        return [1024 * (self._most[pid] - before) for pid, before in self._before.items()]

    def _watch(self) -> None:
        while not self._done.is_set():
            for pid, most in self._most.items():
                self._most[pid] = max(most, kilobytes("RssAnon", pid))
            time.sleep(0.001)
