"""The reference as a policy worker sees it when it has workers of its own: scored in advance, or some steps ahead."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
import torch
from ray.exceptions import RayActorError

from thresher.assembly.inputs import RunInputs
from thresher.assembly.reference import ReferenceParts, idle_settings, starts_alike
from thresher.assembly.run import build_micro_batching
from thresher.config import DPOConfig
from thresher.data.batch import PairBatch
from thresher.data.plan import PairIds
from thresher.errors import UserError
from thresher.losses.pairs import SidesLogps
from thresher.reference.modes import Mode
from thresher.reference.scorers import PrecomputedReference
from thresher.runtime.logps_transport import split
from thresher.strategies.native.train import NativeTrain
from thresher.trainer import ReferenceScorer, evaluation_batches


@dataclass(frozen=True)
class ReferenceLink:
    """What a policy worker must know of the reference's workers; digest names their weights."""

    mode: Mode
    digest: str
    workers: tuple[Any, ...]


@dataclass(frozen=True)
class ScoredBlocks:
    """Logps of some neighbouring blocks of a split, as a reference to the object store."""

    blocks: tuple[int, ...]
    logps: Any


@dataclass(frozen=True)
class ScoredInAdvance:
    """What reference workers have scored before the first step."""

    train: tuple[ScoredBlocks, ...]
    validation: tuple[ScoredBlocks, ...]
    seconds_per_pair: float


class ReferenceAhead:
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
        self._unit: dict[bytes, SidesLogps] = {}

    def logps(self, batch: PairBatch) -> SidesLogps:
        """Take a batch out of the current unit, moving on to the unit that holds it; they come in order."""
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
            reason = str(error).strip().splitlines()[0]
            raise UserError(
                f"a reference worker died: {reason}; look for the cause (often memory) and go on with "
                "resume_from_checkpoint=auto"
            ) from None
        parts = split(flat, [len(ids) for ids in batches], self._device)
        self._unit = {ids.tobytes(): part for ids, part in zip(batches, parts, strict=True)}

    def _request(self) -> None:
        """Keep `ahead` units asked for; an empty share needs no answer."""
        while len(self._asked) < self._ahead and (self._repeats or self._next < len(self._units)):
            unit = self._units[self._next % len(self._units)]
            self._asked.append((unit, self._ask(unit) if self._batches_of(unit) else None))
            self._next += 1


def linked_reference(
    config: DPOConfig, inputs: RunInputs, policy: NativeTrain, link: ReferenceLink, first_step: int
) -> ReferenceParts:
    """Make a policy worker's reference out of its link to the reference's workers."""
    train: ReferenceScorer
    validation: ReferenceScorer | None
    if link.mode == "precompute":
        size = config.reference.infer_batch_size
        train = PrecomputedReference(size, policy.device)
        validation = None if inputs.validation is None else PrecomputedReference(size, policy.device)
    else:
        train, validation = _ahead(config, inputs, policy, link, first_step)
    notes = idle_settings(config, link.mode, works_ahead=link.mode == "concurrent")
    return ReferenceParts(link.mode, train, validation, link.digest, starts_alike(config), notes=notes)


def _ahead(
    config: DPOConfig, inputs: RunInputs, policy: NativeTrain, link: ReferenceLink, first_step: int
) -> tuple[ReferenceAhead, ReferenceAhead | None]:
    ranks, workers, plan = policy.ranks, link.workers, inputs.plan
    micro_batching = build_micro_batching(config, inputs.layout, inputs.train, policy.hidden_size)

    def worker_of(unit: int) -> Any:
        return workers[(unit * ranks.size + ranks.rank) % len(workers)]  # shares go round, so that all have work

    train = ReferenceAhead(
        lambda step: micro_batching.cut(plan.pair_ids(step), ranks.rank, ranks.size),
        lambda step: worker_of(step).score_step.remote(step, ranks.rank),
        units=range(first_step, plan.num_steps),
        repeats=False,
        ahead=config.reference.steps_ahead,
        device=policy.device,
    )
    if inputs.validation is None:
        return train, None
    size = config.actor_train.training_args.pairs_per_eval_batch
    batches = evaluation_batches(len(inputs.validation), size, ranks.rank, ranks.size)
    validation = ReferenceAhead(
        lambda at: [batches[at]],
        lambda at: worker_of(at).score_held_out.remote(at, ranks.rank),
        units=range(len(batches)),
        repeats=True,
        ahead=config.reference.steps_ahead,
        device=policy.device,
    )
    return train, validation


def fill_from(scored: ScoredInAdvance, reference: ReferenceParts, inputs: RunInputs) -> None:
    """Put logps that reference workers scored into a policy worker's tables."""
    for table, store, parts in (
        (reference.train, inputs.train, scored.train),
        (reference.validation, inputs.validation, scored.validation),
    ):
        if not isinstance(table, PrecomputedReference) or store is None:
            continue
        for part, flat in zip(parts, ray.get([part.logps for part in parts]), strict=True):
            sizes = [len(table.pairs_of(block, store)) for block in part.blocks]
            for block, sides in zip(part.blocks, split(flat, sizes, torch.device("cpu")), strict=True):
                table.put(block, sides)
        table.seconds_per_pair = scored.seconds_per_pair
