"""The ranks of the policy as one group: the trainer that calls all of them, and how a run on them begins."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from thresher.builders.inputs import RunInputs
from thresher.builders.precompute import ProgressCallback
from thresher.builders.reference_mode import reference_has_workers
from thresher.config import DPOConfig
from thresher.errors import RescaleRequested
from thresher.reference.cache_admin import cache_root
from thresher.reference.modes import ReferenceMode
from thresher.runtime import RunHandle
from thresher.runtime.rank import LoadedPolicy, RankReport, ReferenceHandle, cached_splits
from thresher.training.trainer import EvaluationRecord, Record

logger = logging.getLogger(__name__)


class RankGroup(Protocol):
    """Processes of a role whose methods are called collectively. The first failure ends all of them."""

    @property
    def num_nodes(self) -> int: ...

    def __len__(self) -> int: ...

    def call(self, method: str, *arguments: object) -> list[Any]:
        """Call a method of every rank; return the results by rank, of rank 0 alone if the others return none."""
        ...

    def stream(self, method: str, others_method: str, *arguments: object) -> Iterator[Any]:
        """Yield the items of a generator method of rank 0, while the other ranks run `others_method`."""
        ...


class TrainerGroup:
    """All ranks of the policy as one `Trainable`: every call goes to all ranks and returns the result of rank 0.

    can_scale_up: called between a checkpoint and the next step; a message from it requests a restart with more workers.
    """

    def __init__(self, ranks: RankGroup, can_scale_up: Callable[[], str | None] = lambda: None):
        self._ranks = ranks
        self._can_scale_up = can_scale_up
        self._is_saved = False

    def run(self, until: int) -> Iterator[Record]:
        if self._is_saved and (reason := self._can_scale_up()):
            self.wait_for_saves()
            raise RescaleRequested(reason)
        self._is_saved = False
        return self._ranks.stream("run", "run_quietly", until)

    @property
    def stopped_at(self) -> int | None:
        stopped_at: int | None = self._ranks.call("stopped_at")[0]
        return stopped_at

    def evaluate_and_record(self) -> Iterator[EvaluationRecord]:
        return self._ranks.stream("evaluate_and_record", "evaluate_quietly")

    def save(self) -> None:
        self._ranks.call("save")
        self._is_saved = True

    def wait_for_saves(self) -> None:
        self._ranks.call("wait_for_saves")


@dataclass(frozen=True)
class CachedReference:
    """The pairs of a run whose reference logps the cache has and lacks; none outside of mode precompute."""

    num_found: int = 0
    num_missing: int = 0

    @classmethod
    def look_up(cls, config: DPOConfig, inputs: RunInputs, mode: ReferenceMode, weights: str | None) -> CachedReference:
        """Count the pairs; if the cache lacks none, the reference is not loaded."""
        if mode != "precompute":
            return cls()
        both = cached_splits(config, inputs, str(weights), torch.device("cpu"))
        splits = [split for split in both if split is not None]
        num_missing = sum(split.num_missing for split in splits)
        return cls(sum(split.num_pairs for split in splits) - num_missing, num_missing)


@dataclass(frozen=True)
class GroupStarter:
    """Builds the trainers of ranks that have loaded the policy.

    scorers: the group that fills the reference cache, the policy's ranks if None. release_reference: called when the
    cache is filled.
    """

    config: DPOConfig
    inputs: RunInputs
    ranks: RankGroup
    loaded: LoadedPolicy
    cached: CachedReference
    progress: ProgressCallback
    scorers: RankGroup | None = None
    release_reference: Callable[[], None] = lambda: None
    can_scale_up: Callable[[], str | None] = lambda: None

    def build(
        self,
        checkpoint: Path | None,
        mode: ReferenceMode,
        weights: str | None,
        *,
        reference_workers: tuple[Any, ...] = (),
        notes: tuple[str, ...] = (),
    ) -> RunHandle:
        """Build the trainer of every rank, and restore a checkpoint if there is one."""
        on_policy_axes = not reference_has_workers(self.config, mode) and not self.cached.num_found
        handle = ReferenceHandle(mode, weights, reference_workers, on_policy_axes)
        report: RankReport = self.ranks.call("build", checkpoint, handle)[0]
        size, num_nodes = len(self.ranks), self.ranks.num_nodes
        return RunHandle(
            TrainerGroup(self.ranks, self.can_scale_up),
            report.progress,
            report.reference_mode,
            self.loaded.layout.name,
            f"{size} x {report.device} on {num_nodes} node{'s' if num_nodes > 1 else ''}",
            report.parameter_counts,
            (*self.loaded.notes, *report.notes, *notes),
            partial(self._begin, mode, weights, report),
            self.ranks,
            self.scorers,
            self.inputs.max_tokens,
        )

    def _begin(
        self, mode: ReferenceMode, weights: str | None, report: RankReport, *, to_evaluate: bool = False
    ) -> None:
        seconds_per_pair = None
        if mode == "precompute" and (to_evaluate or report.progress.step < self.inputs.plan.num_steps):
            seconds_per_pair = 0.0
            if self.cached.num_missing:
                seconds_per_pair = self._score_missing(str(weights)) / self.inputs.plan.num_visits
            owner = "its" if reference_has_workers(self.config, mode) else "the policy's"
            found, scored = f"{self.cached.num_found:,}", f"{self.cached.num_missing:,}"
            logger.info("reference: %s pairs from the cache, %s scored by %s workers", found, scored, owner)
        if mode == "precompute":
            self.release_reference()
        self.ranks.call("begin", seconds_per_pair)

    def _score_missing(self, weights: str) -> float:
        """Fill the cache; return the elapsed seconds."""
        started = time.perf_counter()
        scorers = self.scorers or self.ranks
        for what, done, total in scorers.stream("score_missing", "score_missing_quietly", weights):
            self.progress(f"scoring the reference: {what} pairs, blocks of worker 0", done, total)
        return time.perf_counter() - started


def with_absolute_cache_dir(config: DPOConfig, mode: ReferenceMode) -> DPOConfig:
    """Resolve the directory of the reference cache in this process: other ranks may have another environment."""
    if mode != "precompute":
        return config
    cache_dir = str(cache_root(config.reference_cache_dir).resolve())
    return config.model_copy(update={"reference": config.reference.model_copy(update={"cache_dir": cache_dir})})
