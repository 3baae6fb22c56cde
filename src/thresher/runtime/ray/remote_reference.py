"""The reference of a policy worker whose logps are prefetched from reference workers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import ray
import torch
from ray.exceptions import RayActorError

from thresher.builders.inputs import RunInputs, build_eval_batching, build_micro_batching
from thresher.builders.reference import ReferenceBundle
from thresher.config import DPOConfig
from thresher.data.batching.plan import PairIds
from thresher.data.pair import PairBatch
from thresher.errors import WorkerLostError
from thresher.losses.pairs import ChosenRejectedLogps, empty_logps
from thresher.runtime.rank import ReferenceHandle, bundle_of
from thresher.runtime.ray.cluster import death_cause
from thresher.runtime.ray.logps_transport import unpack_logps
from thresher.strategies.engine import TrainEngine
from thresher.training.trainer import evaluation_batches


class PrefetchingReference:
    """Logps that reference workers compute while the policy trains on earlier pairs.

    A work item is a rank's micro-batches of a step, or one of its validation batches. It is submitted `prefetch_depth`
    items before it is needed and no earlier, which bounds the number of waiting results.
    """

    def __init__(
        self,
        batches_of: Callable[[int], Sequence[PairIds]],
        submit: Callable[[int], Any],
        *,
        work_items: Sequence[int],
        repeats: bool,
        prefetch_depth: int,
        device: torch.device,
    ):
        self.seconds_per_pair = 0.0  # included in the time that the policy waits
        self._batches_of = batches_of
        self._submit = submit
        self._work_items = work_items
        self._repeats = repeats
        self._prefetch_depth = prefetch_depth
        self._device = device
        self._next = 0
        self._pending: deque[tuple[int, Any]] = deque()
        self._current: dict[bytes, ChosenRejectedLogps] = {}

    def logps(self, batch: PairBatch) -> ChosenRejectedLogps:
        """Return the logps of a batch, advancing to its work item; batches come in order."""
        if not len(batch):
            return empty_logps(self._device)
        key = batch.pair_ids.tobytes()
        for _ in range(len(self._work_items) + 1):
            if key in self._current:
                return self._current[key]
            self._advance()
        raise KeyError(f"no step of the plan has a batch of the pairs {batch.pair_ids.tolist()} for this rank")

    def _advance(self) -> None:
        self._prefetch()
        if not self._pending:
            return
        item, result = self._pending.popleft()
        self._prefetch()
        batches = self._batches_of(item)
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
        logps = unpack_logps(flat, [len(ids) for ids in batches], self._device)
        self._current = {ids.tobytes(): each for ids, each in zip(batches, logps, strict=True)}

    def _prefetch(self) -> None:
        """Keep `prefetch_depth` work items submitted; an empty item needs no result."""
        while len(self._pending) < self._prefetch_depth and (self._repeats or self._next < len(self._work_items)):
            item = self._work_items[self._next % len(self._work_items)]
            self._pending.append((item, self._submit(item) if self._batches_of(item) else None))
            self._next += 1


def prefetch_reference(
    config: DPOConfig, inputs: RunInputs, policy: TrainEngine, handle: ReferenceHandle, first_step: int
) -> ReferenceBundle:
    """Build the reference of a policy worker whose logps the reference workers compute."""
    return bundle_of(config, handle, *_prefetching(config, inputs, policy, handle, first_step))


def _prefetching(
    config: DPOConfig, inputs: RunInputs, policy: TrainEngine, handle: ReferenceHandle, first_step: int
) -> tuple[PrefetchingReference, PrefetchingReference | None]:
    dp_group, workers, plan = policy.dp_group, handle.workers, inputs.plan
    micro_batching = build_micro_batching(config, inputs, policy.hidden_size)

    def worker_for(item: int) -> Any:
        return workers[(item * dp_group.size + dp_group.rank) % len(workers)]  # round-robin over items and ranks

    train = PrefetchingReference(
        lambda step: micro_batching.split(plan.pair_ids(step), dp_group.rank, dp_group.size),
        lambda step: worker_for(step).score_step.remote(step, dp_group.rank),
        work_items=range(first_step, plan.num_steps),
        repeats=False,
        prefetch_depth=config.reference.prefetch_steps,
        device=policy.device,
    )
    if inputs.validation is None:
        return train, None
    batching = build_eval_batching(config, inputs)
    batches = evaluation_batches(inputs.validation.lengths, batching, dp_group.rank, dp_group.size)
    validation = PrefetchingReference(
        lambda index: [batches[index]],
        lambda index: worker_for(index).score_validation.remote(index, dp_group.rank),
        work_items=range(len(batches)),
        repeats=True,
        prefetch_depth=config.reference.prefetch_steps,
        device=policy.device,
    )
    return train, validation
