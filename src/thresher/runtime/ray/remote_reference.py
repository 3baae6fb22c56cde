"""The reference of a policy worker: read from the cache, prefetched from reference workers, or loaded locally."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
import torch
from ray.exceptions import RayActorError

from thresher.builders.inputs import RunInputs, build_micro_batching
from thresher.builders.precompute import look_up_splits, open_cache
from thresher.builders.reference import ReferenceBundle, build_reference_bundle, reference_digest
from thresher.builders.reference_mode import same_initial_weights
from thresher.config import DPOConfig
from thresher.data.batching.plan import PairIds
from thresher.data.pair import PairBatch
from thresher.errors import UserError, WorkerLostError
from thresher.losses.pairs import ChosenRejectedLogps, empty_logps
from thresher.reference.cache_admin import cache_root
from thresher.reference.modes import ReferenceMode
from thresher.reference.scorers import PrecomputedReference
from thresher.reference.step_zero_check import Forwards
from thresher.runtime.ray.cluster import death_cause
from thresher.runtime.ray.logps_transport import unpack_logps
from thresher.strategies.native.train import NativeTrain
from thresher.training.trainer import ReferenceScorer, evaluation_batches


@dataclass(frozen=True)
class ReferenceHandle:
    """Describes the reference to a policy worker: its mode, the digest of its weights, and its workers, if any.

    on_policy_axes: the policy's workers score all of its pairs.
    """

    mode: ReferenceMode
    weights: str | None
    workers: tuple[Any, ...] = ()
    on_policy_axes: bool = False


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


def build_worker_reference(
    config: DPOConfig, inputs: RunInputs, policy: NativeTrain, handle: ReferenceHandle, first_step: int
) -> ReferenceBundle:
    """Build the reference of a policy worker: from the cache, from reference workers, or loaded locally."""
    train: ReferenceScorer
    validation: ReferenceScorer | None
    if handle.mode == "precompute":
        train, validation = cached_splits(config, inputs, str(handle.weights), policy.device)
    elif handle.workers:
        train, validation = _prefetching(config, inputs, policy, handle, first_step)
    else:
        return build_reference_bundle(config, inputs, policy, device=policy.device, weights=handle.weights)
    digest = reference_digest(config, handle.mode, handle.weights)
    forwards: Forwards = "other batches" if handle.on_policy_axes else "other axes"
    return ReferenceBundle(handle.mode, train, validation, digest, same_initial_weights(config), forwards)


def cached_splits(
    config: DPOConfig, inputs: RunInputs, weights: str, device: torch.device
) -> tuple[PrecomputedReference, PrecomputedReference | None]:
    """Look up the pairs of the run in the cache, in the driver, reference workers and policy workers alike."""
    return look_up_splits(config, inputs, open_cache(config, weights), device)


def refresh_lookup(reference: ReferenceBundle, config: DPOConfig, seconds_per_pair: float) -> None:
    """Repeat the lookup after reference workers filled the cache."""
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


def _prefetching(
    config: DPOConfig, inputs: RunInputs, policy: NativeTrain, handle: ReferenceHandle, first_step: int
) -> tuple[PrefetchingReference, PrefetchingReference | None]:
    dp_group, workers, plan = policy.dp_group, handle.workers, inputs.plan
    micro_batching = build_micro_batching(config, inputs.layout, inputs.train, policy.hidden_size)

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
    size = config.actor_train.training_args.pairs_per_eval_batch
    batches = evaluation_batches(len(inputs.validation), size, dp_group.rank, dp_group.size)
    validation = PrefetchingReference(
        lambda index: [batches[index]],
        lambda index: worker_for(index).score_validation.remote(index, dp_group.rank),
        work_items=range(len(batches)),
        repeats=True,
        prefetch_depth=config.reference.prefetch_steps,
        device=policy.device,
    )
    return train, validation
