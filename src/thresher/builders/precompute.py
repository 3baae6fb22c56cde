"""The reference scored in advance: which cache, which pairs, and the model only where one of them is missing."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from thresher.builders.engines import build_reference
from thresher.config import DPOConfig
from thresher.data.batching.plan import PairIds
from thresher.data.pair import PairBatch
from thresher.data.store.reader import PairStore
from thresher.models.layouts import Layout
from thresher.reference.cache import ReferenceCache
from thresher.reference.cache_admin import cache_root
from thresher.reference.fingerprint import ReferenceFingerprint, config_digest
from thresher.reference.scorers import PrecomputedReference
from thresher.strategies.native.infer import NativeInfer

logger = logging.getLogger(__name__)

ProgressCallback = Callable[[str, int, int], None]


class PrecomputeJob:
    """Both splits, looked up in the cache; `run` scores what it lacks and lets the model go."""

    def __init__(
        self,
        cache: ReferenceCache,
        train: PrecomputedReference,
        validation: PrecomputedReference | None,
        load: Callable[[], NativeInfer],
        progress: ProgressCallback,
    ) -> None:
        self.train = train
        self.validation = validation
        self._where = f"the cache is {cache.directory}"
        self._progress = progress
        self._num_found = sum(split.num_pairs - split.num_missing for _, split in self._splits())
        # loaded now, not in `run`: a model that cannot be used is told before anything else starts
        self._reference = load() if any(split.num_missing for _, split in self._splits()) else None

    def run(self) -> None:
        """Score what is missing, and say how many pairs came from where."""
        # the last hold on the model: its memory goes to the policy when this returns
        reference, self._reference = self._reference, None
        if reference is not None:
            for what, split in self._splits():
                advance = partial(self._progress, f"scoring the reference: {what} pairs")
                split.score_missing(reference.score, advance=advance)
        num_scored = sum(split.num_scored for _, split in self._splits())
        found, scored = f"{self._num_found:,}", f"{num_scored:,}"
        logger.info("reference: %s pairs from the cache, %s scored; %s", found, scored, self._where)

    def _splits(self) -> list[tuple[str, PrecomputedReference]]:
        both = [("training", self.train), ("held-out", self.validation)]
        return [(what, split) for what, split in both if split is not None]


def plan_precompute(
    config: DPOConfig,
    layout: Layout,
    train: PairStore,
    train_ids: PairIds,
    validation: PairStore | None,
    probe: PairBatch,
    weights: str,
    device: torch.device,
    *,
    num_visits: int,
    progress: ProgressCallback,
) -> PrecomputeJob:
    """Look up the training pairs `train_ids` and all held-out pairs; load the reference if one is missing.

    weights is the digest of the reference's weights; num_visits is how many pairs the run trains on, repeats counted.
    """
    cache = open_cache(config, weights)

    def load() -> NativeInfer:
        reference = build_reference(config, layout)
        reference.check_logps(probe)
        return reference

    splits = look_up_splits(config, cache, train, train_ids, validation, device, num_visits=num_visits)
    return PrecomputeJob(cache, *splits, load, progress)


def look_up_splits(
    config: DPOConfig,
    cache: ReferenceCache,
    train: PairStore,
    train_ids: PairIds,
    validation: PairStore | None,
    device: torch.device,
    *,
    num_visits: int,
) -> tuple[PrecomputedReference, PrecomputedReference | None]:
    """Look up the training pairs `train_ids` and all held-out pairs; every process finds the same."""
    size = config.reference.infer_batch_size

    def lookup(store: PairStore, pair_ids: PairIds, num_visits: int) -> PrecomputedReference:
        return PrecomputedReference(cache, store, pair_ids, pairs_per_block=size, device=device, num_visits=num_visits)

    held_out = None
    if validation is not None:
        every = np.arange(len(validation), dtype=np.int64)
        held_out = lookup(validation, every, len(every))
    return lookup(train, train_ids, num_visits), held_out


def open_cache(config: DPOConfig, weights: str) -> ReferenceCache:
    """The cache of this config's reference, whether or not anything is in it yet."""
    model = str(config.reference_path)
    identity = ReferenceFingerprint(
        weights=weights,
        settings=config_digest(model, trust_remote_code=config.trusts_reference_code),
        dtype=config.reference_dtype,
        master_dtype=config.reference_master_dtype,
    )
    return ReferenceCache(cache_root(config.reference.cache_dir), identity, model)
