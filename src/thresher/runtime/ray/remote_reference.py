"""The reference as a policy worker sees it: in the cache, some steps ahead on other workers, or beside the policy."""

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
from thresher.builders.reference import (
    ReferenceBundle,
    build_reference_bundle,
    reference_digest,
    same_initial_weights,
    unused_settings,
)
from thresher.config import DPOConfig
from thresher.data.batching.plan import PairIds
from thresher.data.pair import PairBatch
from thresher.errors import UserError, WorkerLostError
from thresher.losses.pairs import ChosenRejectedLogps, empty_logps
from thresher.reference.cache_admin import cache_root
from thresher.reference.modes import ReferenceMode
from thresher.reference.scorers import PrecomputedReference
from thresher.runtime.ray.logps_transport import unpack_logps
from thresher.strategies.native.train import NativeTrain
from thresher.training.trainer import ReferenceScorer, evaluation_batches


@dataclass(frozen=True)
class ReferenceHandle:
    """What a policy worker must know of the reference: its mode, the digest of its files, and its workers, if any."""

    mode: ReferenceMode
    weights: str | None
    workers: tuple[Any, ...] = ()


class PrefetchingReference:
    """Logps that reference workers compute while the policy trains on earlier pairs.

    Work comes in units: a rank's share of a step, or a batch of its held-out pairs. A unit is asked for `ahead` units
    before it is needed and no earlier, so that results do not pile up.
    """

    def __init__(
        self,
        batches_of: Callable[[int], Sequence[PairIds]],
        ask: Callable[[int], Any],
        *,
        units: Sequence[int],
        repeats: bool,
        ahead: int,
        device: torch.device,
    ):
        self.seconds_per_pair = 0.0  # the policy waits where this is slower, and its clock sees that
        self._batches_of = batches_of
        self._ask = ask
        self._units = units
        self._repeats = repeats
        self._ahead = ahead
        self._device = device
        self._next = 0
        self._asked: deque[tuple[int, Any]] = deque()
        self._unit: dict[bytes, ChosenRejectedLogps] = {}

    def logps(self, batch: PairBatch) -> ChosenRejectedLogps:
        """Take a batch out of the current unit, moving on to the unit that holds it; they come in order."""
        if not len(batch):
            return empty_logps(self._device)
        key = batch.pair_ids.tobytes()
        for _ in range(len(self._units) + 1):
            if key in self._unit:
                return self._unit[key]
            self._advance()
        raise KeyError(f"no step of the plan has a batch of the pairs {batch.pair_ids.tolist()} for this rank")

    def _advance(self) -> None:
        self._request()
        if not self._asked:
            return
        unit, answer = self._asked.popleft()
        self._request()
        batches = self._batches_of(unit)
        if not batches:
            self._unit = {}
            return
        try:
            flat = ray.get(answer)
        except RayActorError as error:
            reason = str(error).strip().splitlines()[0].rstrip(".")
            raise WorkerLostError(
                f"a reference worker died: {reason}\nlook for the cause (often memory) and start the run again: it "
                "goes on from the newest checkpoint"
            ) from None
        parts = unpack_logps(flat, [len(ids) for ids in batches], self._device)
        self._unit = {ids.tobytes(): part for ids, part in zip(batches, parts, strict=True)}

    def _request(self) -> None:
        """Keep `ahead` units asked for; an empty share needs no answer."""
        while len(self._asked) < self._ahead and (self._repeats or self._next < len(self._units)):
            unit = self._units[self._next % len(self._units)]
            self._asked.append((unit, self._ask(unit) if self._batches_of(unit) else None))
            self._next += 1


def build_worker_reference(
    config: DPOConfig, inputs: RunInputs, policy: NativeTrain, link: ReferenceHandle, first_step: int
) -> ReferenceBundle:
    """Make a policy worker's reference: in the cache that reference workers fill, some steps ahead, or its own."""
    train: ReferenceScorer
    validation: ReferenceScorer | None
    if link.mode == "precompute":
        train, validation = cached_splits(config, inputs, str(link.weights), policy.device)
    elif link.workers:
        train, validation = _ahead(config, inputs, policy, link, first_step)
    else:
        return build_reference_bundle(config, inputs, policy, device=policy.device, weights=link.weights)
    digest = reference_digest(config, link.mode, link.weights)
    notes = unused_settings(config, link.mode, works_ahead=link.mode == "concurrent")
    return ReferenceBundle(link.mode, train, validation, digest, same_initial_weights(config), notes=notes)


def cached_splits(
    config: DPOConfig, inputs: RunInputs, weights: str, device: torch.device
) -> tuple[PrecomputedReference, PrecomputedReference | None]:
    """Look the run's pairs up in the cache; driver, reference workers and policy workers all do."""
    return look_up_splits(config, inputs, open_cache(config, weights), device)


def refresh_lookup(reference: ReferenceBundle, config: DPOConfig, seconds_per_pair: float) -> None:
    """Find what reference workers have put into the cache meanwhile."""
    for split in (reference.train, reference.validation):
        if isinstance(split, PrecomputedReference):
            split.lookup()
            if split.num_missing:
                raise UserError(
                    f"the reference's workers scored {split.num_missing} pairs that a policy worker does not find in "
                    f"{cache_root(config.reference.cache_dir)}; set reference.cache_dir to a place that all nodes share"
                )
            split.seconds_per_pair = seconds_per_pair


def _ahead(
    config: DPOConfig, inputs: RunInputs, policy: NativeTrain, link: ReferenceHandle, first_step: int
) -> tuple[PrefetchingReference, PrefetchingReference | None]:
    ranks, workers, plan = policy.dp_group, link.workers, inputs.plan
    micro_batching = build_micro_batching(config, inputs.layout, inputs.train, policy.hidden_size)

    def worker_of(unit: int) -> Any:
        return workers[(unit * ranks.size + ranks.rank) % len(workers)]  # shares go round, so that all have work

    train = PrefetchingReference(
        lambda step: micro_batching.split(plan.pair_ids(step), ranks.rank, ranks.size),
        lambda step: worker_of(step).score_step.remote(step, ranks.rank),
        units=range(first_step, plan.num_steps),
        repeats=False,
        ahead=config.reference.prefetch_steps,
        device=policy.device,
    )
    if inputs.validation is None:
        return train, None
    size = config.actor_train.training_args.pairs_per_eval_batch
    batches = evaluation_batches(len(inputs.validation), size, ranks.rank, ranks.size)
    validation = PrefetchingReference(
        lambda at: [batches[at]],
        lambda at: worker_of(at).score_validation.remote(at, ranks.rank),
        units=range(len(batches)),
        repeats=True,
        ahead=config.reference.prefetch_steps,
        device=policy.device,
    )
    return train, validation
