"""The reference of a policy worker whose logps reference workers compute ahead, and their transfer as NumPy arrays.

Ray's object store shares the arrays without copying.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import ray
import torch
from ray.exceptions import RayActorError

from thresher.builders.inputs import RunInputs, build_eval_batching, build_micro_batching
from thresher.builders.reference_mode import same_initial_weights
from thresher.data.batching.plan import PairIds
from thresher.data.example import ExampleBatch
from thresher.distributed.tensors import copy_to_device
from thresher.engines.engine import TrainEngine
from thresher.errors import WorkerLostError
from thresher.losses.pairs import ExampleLogps, ResponseLogps, concat_sides, empty_logps
from thresher.reference.scorers import Reference
from thresher.runtime.ray.cluster import death_cause
from thresher.training.trainer import evaluation_batches


class FlatSide(NamedTuple):
    """One response of each of some examples, concatenated."""

    values: npt.NDArray[np.float32]
    lengths: npt.NDArray[np.int64]


def pack_logps(batches: Sequence[ExampleLogps]) -> list[FlatSide]:
    """Concatenate the logps of several batches."""
    sides = concat_sides(batches).sides
    return [FlatSide(side.values.float().cpu().numpy(), side.lengths.cpu().numpy()) for side in sides]


def unpack_logps(flat: Sequence[FlatSide], pairs_per_batch: Sequence[int], device: torch.device) -> list[ExampleLogps]:
    """Split concatenated logps into batches. On the CPU the results are views of the object store's memory."""
    bounds = np.cumsum([0, *pairs_per_batch])

    def unpack(values: npt.NDArray[np.float32], lengths: npt.NDArray[np.int64]) -> list[ResponseLogps]:
        tokens = np.concatenate([[0], np.cumsum(lengths)])[bounds]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")  # logps are read-only
            all_values, all_lengths = (copy_to_device(torch.from_numpy(each), device) for each in (values, lengths))
        return [
            ResponseLogps(all_values[tokens[at] : tokens[at + 1]], all_lengths[bounds[at] : bounds[at + 1]])
            for at in range(len(pairs_per_batch))
        ]

    return [ExampleLogps(sides) for sides in zip(*(unpack(*side) for side in flat), strict=True)]


@dataclass
class PrefetchingReference:
    """Logps that reference workers compute while the policy trains on earlier pairs.

    A work item is a rank's micro-batches of a step, or one of its validation batches. It is submitted `prefetch_depth`
    items before it is needed and no earlier, which bounds the number of waiting results.
    """

    batches_of: Callable[[int], Sequence[PairIds]]
    submit: Callable[[int], Any]
    work_items: Sequence[int]
    repeats: bool
    prefetch_depth: int
    device: torch.device
    seconds_per_pair: float = 0.0  # included in the time that the policy waits
    _next: int = 0
    _pending: deque[tuple[int, Any]] = field(default_factory=deque)
    _current: dict[bytes, ExampleLogps] = field(default_factory=dict)

    def logps(self, batch: ExampleBatch) -> ExampleLogps:
        """Return the logps of a batch, advancing to its work item; batches come in order."""
        if not len(batch):
            return empty_logps(self.device)
        key = batch.pair_ids.tobytes()
        for _ in range(len(self.work_items) + 1):
            if key in self._current:
                # those of all batches of the item have as many sides as the widest
                return ExampleLogps(self._current[key].sides[: batch.num_sides])
            self._advance()
        raise KeyError(f"no step of the plan has a batch of the pairs {batch.pair_ids.tolist()} for this rank")

    def _advance(self) -> None:
        self._prefetch()
        if not self._pending:
            return
        item, result = self._pending.popleft()
        self._prefetch()
        batches = self.batches_of(item)
        if not batches:
            self._current = {}
            return
        try:
            flat = ray.get(result)
        except RayActorError as error:
            raise WorkerLostError(
                f"a reference worker died: {death_cause(error)}\nlook for the cause, then rerun the same command to "
                "resume from the newest checkpoint"
            ) from None
        logps = unpack_logps(flat, [len(ids) for ids in batches], self.device)
        self._current = {ids.tobytes(): each for ids, each in zip(batches, logps, strict=True)}

    def _prefetch(self) -> None:
        """Keep `prefetch_depth` work items submitted; an empty item needs no result."""
        while len(self._pending) < self.prefetch_depth and (self.repeats or self._next < len(self.work_items)):
            item = self.work_items[self._next % len(self.work_items)]
            self._pending.append((item, self.submit(item) if self.batches_of(item) else None))
            self._next += 1


def prefetch_reference(inputs: RunInputs, policy: TrainEngine, workers: Sequence[Any], first_step: int) -> Reference:
    """Build the reference of a policy worker whose logps the reference workers compute."""
    config, dp_group, plan = inputs.config, policy.dp_group, inputs.plan
    micro_batching = build_micro_batching(inputs, policy.hidden_size)

    def worker_for(item: int) -> Any:
        return workers[(item * dp_group.size + dp_group.rank) % len(workers)]  # round-robin over items and ranks

    prefetching = partial(PrefetchingReference, prefetch_depth=config.reference.prefetch_steps, device=policy.device)
    train = prefetching(
        lambda step: micro_batching.split(plan.pair_ids(step), dp_group.rank, dp_group.size),
        lambda step: worker_for(step).score_step.remote(step, dp_group.rank),
        work_items=range(first_step, plan.num_steps),
        repeats=False,
    )
    validation = None
    if (examples := inputs.validation_examples) is not None:
        of_sets = evaluation_batches(examples, build_eval_batching(inputs), dp_group.rank, dp_group.size)
        batches = [ids for each in of_sets.values() for ids in each]
        validation = prefetching(
            lambda index: [batches[index]],
            lambda index: worker_for(index).score_validation.remote(index, dp_group.rank),
            work_items=range(len(batches)),
            repeats=True,
        )
    return Reference(train, validation, same_initial_weights(config), "other mesh")
