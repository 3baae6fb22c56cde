"""All ranks of a policy as one group: a run starts, begins and trains by calls that go to each of them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Protocol, TypeVar

from thresher.builders.engines import device_of
from thresher.builders.hardware import Hardware
from thresher.builders.inputs import RunInputs
from thresher.builders.reference import ProgressCallback, log_scored
from thresher.builders.reference_mode import ReferenceMode, reference_has_workers
from thresher.builders.token_budget import with_token_budget
from thresher.config import DPOConfig
from thresher.errors import RescaleRequested
from thresher.models.layouts import Layout
from thresher.reference.cache import cache_root
from thresher.runtime.rank import PolicyRank
from thresher.training.trainer import EvaluationRecord, Record

logger = logging.getLogger(__name__)

T = TypeVar("T")


class RankGroup(Protocol):
    """Processes of a role whose methods are called collectively. The first failure ends all of them.

    A method is given as the function of its class; only a group of several processes sends its name.
    """

    @property
    def num_nodes(self) -> int: ...

    def __len__(self) -> int: ...

    def on_all(self, method: Callable[..., T], *arguments: object) -> T:
        """Call a method of every rank; return the result of rank 0."""
        ...

    def stream(self, method: Callable[..., Iterator[T]], *arguments: object) -> Iterator[T]:
        """Yield the items of a generator method of rank 0, while the other ranks run it to its end."""
        ...


class LocalRanks:
    """A group of one: the rank is in this process, and its methods are called in place."""

    num_nodes = 1

    def __init__(self, config: DPOConfig):
        self.rank = PolicyRank(0, 1, device_of(config.actor_train))
        self.rank.open(config, config.log_dir.resolve())

    def __len__(self) -> int:
        return 1

    def on_all(self, method: Callable[..., T], *arguments: object) -> T:
        return method(self.rank, *arguments)

    def stream(self, method: Callable[..., Iterator[T]], *arguments: object) -> Iterator[T]:
        return method(self.rank, *arguments)


class Runtime:
    """A run on the ranks of its policy, which score the reference too, as one `Trainable`: a call goes to all ranks.

    `RayRuntime` adds workers for the reference.
    """

    # the reference's own workers, which fill its cache or score during training; None if the policy's ranks score it
    scorers: RankGroup | None = None
    # set by `start`
    inputs: RunInputs  # the driver's, with the ranks' layout and token budget
    checkpoint: Path | None  # what the run resumes from
    _show_progress: ProgressCallback
    _is_saved = False

    def __init__(self, config: DPOConfig, ranks: RankGroup):
        self.config = config
        self._ranks = ranks

    @property
    def ranks(self) -> RankGroup:
        return self._ranks

    def find_damage(self, checkpoint: Path) -> list[str]:
        """Compare the files of a checkpoint with their digests, on the ranks; return what is wrong."""
        return self.ranks.on_all(PolicyRank.find_damage, checkpoint)

    def start(self, inputs: RunInputs, checkpoint: Path | None, show_progress: ProgressCallback) -> None:
        """Load the models on all ranks, and restore a checkpoint if there is one."""
        # the ranks' config may name fewer workers than the run's, whose plan it must not change
        of_ranks = inputs.replace(config=self.config, plan=inputs.plan)
        of_ranks = with_token_budget(of_ranks, checkpoint, self.smallest_gpu)
        layout, notes = self.load(of_ranks, checkpoint)
        for note in notes:
            logger.warning("%s", note)
        self.inputs = inputs.replace(layout=layout, max_tokens=of_ranks.max_tokens)
        self.checkpoint, self._show_progress, self._is_saved = checkpoint, show_progress, False

    def smallest_gpu(self) -> Hardware | None:
        return self.ranks.on_all(PolicyRank.smallest_gpu)

    def load(self, inputs: RunInputs, checkpoint: Path | None) -> tuple[Layout, tuple[str, ...]]:
        """Load the models, and build the trainers; return the layout that the policy supports, and warnings."""
        layout, _ = self.ranks.on_all(PolicyRank.load, inputs)
        return layout, self.ranks.on_all(PolicyRank.build, checkpoint)

    def release_scorers(self) -> None:
        """Called when the reference cache is filled."""

    def can_scale_up(self) -> str | None:
        """Called between a checkpoint and the next step; a message requests a restart with more workers."""
        return None

    @property
    def step(self) -> int:
        return self.ranks.on_all(PolicyRank.step)

    @property
    def last_evaluation(self) -> Mapping[str, float]:
        return self.ranks.on_all(PolicyRank.last_evaluation)

    @property
    def devices(self) -> str:
        """The hardware of the run, for people."""
        size, nodes, device = len(self.ranks), self.ranks.num_nodes, self.ranks.on_all(PolicyRank.device)
        is_local = isinstance(self.ranks, LocalRanks)
        return device if is_local else f"{size} x {device} on {nodes} node{'s' if nodes > 1 else ''}"

    @property
    def actor_train(self) -> object:
        """What trains: the trainer of the rank in this process, or the workers."""
        return self.ranks.rank.trainer if isinstance(self.ranks, LocalRanks) else self.ranks

    @property
    def reference(self) -> object:
        """What scores the reference: an object in this process, or its workers; None if the policy's workers do."""
        return self.ranks.rank.reference if isinstance(self.ranks, LocalRanks) else self.scorers

    def begin(self, *, to_evaluate: bool = False) -> None:
        """Precompute the reference and check step 0, before the first step."""
        inputs, seconds_per_pair = self.inputs, None
        if inputs.mode == "precompute":
            # a run that has made all steps needs no reference to train
            if to_evaluate or self.step < inputs.plan.num_steps:
                seconds_per_pair = self._score_missing() / inputs.plan.num_visits
            self.release_scorers()
        self.ranks.on_all(PolicyRank.begin, seconds_per_pair)

    def _score_missing(self) -> float:
        """Fill the cache; return the elapsed seconds."""
        started = time.perf_counter()
        num_cached, num_missing = self.ranks.on_all(PolicyRank.count_cached)
        share = scored_by = ""
        if not isinstance(self.ranks, LocalRanks):
            has_workers = reference_has_workers(self.inputs.config, self.inputs.mode)
            share, scored_by = ", blocks of worker 0", " by its workers" if has_workers else " by the policy's workers"
        if num_missing:
            scorers, unit = self.scorers or self.ranks, self.inputs.train.unit
            for what, done, total in scorers.stream(PolicyRank.score_missing):
                self._show_progress(f"scoring the reference: {what} {unit}{share}", done, total)
        log_scored(self.inputs, num_cached, num_missing, scored_by)
        return time.perf_counter() - started if num_missing else 0.0

    def run(self, until: int) -> Iterator[Record]:
        if self._is_saved and (reason := self.can_scale_up()):
            self.wait_for_saves()
            raise RescaleRequested(reason)
        self._is_saved = False
        return self.ranks.stream(PolicyRank.run, until)

    @property
    def stopped_at(self) -> int | None:
        return self.ranks.on_all(PolicyRank.stopped_at)

    def evaluate_and_record(self) -> Iterator[EvaluationRecord]:
        return self.ranks.stream(PolicyRank.evaluate_and_record)

    def save(self) -> None:
        self.ranks.on_all(PolicyRank.save)
        self._is_saved = True

    def wait_for_saves(self) -> None:
        self.ranks.on_all(PolicyRank.wait_for_saves)


def with_absolute_cache_dir(config: DPOConfig, mode: ReferenceMode) -> DPOConfig:
    """Resolve the directory of the reference cache in this process: other ranks may have a different environment."""
    if mode != "precompute":
        return config
    cache_dir = str(cache_root(config.reference_cache_dir).resolve())
    return config.model_copy(update={"reference": config.reference.model_copy(update={"cache_dir": cache_dir})})
