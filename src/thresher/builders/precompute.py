"""Reference logps computed before training: reads the cache, and loads the model only if pairs are missing."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from thresher.builders.checked_engines import build_checked_reference
from thresher.builders.inputs import RunInputs, scoring_batching
from thresher.config import DPOConfig
from thresher.data.batching.batches import Blocks
from thresher.data.batching.plan import PairIds
from thresher.data.store.reader import PairStore
from thresher.reference.cache import ReferenceCache
from thresher.reference.cache_admin import cache_root
from thresher.reference.fingerprint import ReferenceFingerprint, config_digest
from thresher.reference.scorers import PrecomputedReference

logger = logging.getLogger(__name__)

ProgressCallback = Callable[[str, int, int], None]

DEFAULT_PAIRS_PER_PADDED_BLOCK = 8


class PrecomputeJob:
    """The reference logps of a run's pairs; `run` scores those that the cache lacks, then frees the model.

    weights is the digest of the reference's weights. The pairs are those that the run visits, or all training pairs,
    and all validation pairs.
    """

    def __init__(
        self,
        config: DPOConfig,
        inputs: RunInputs,
        weights: str,
        device: torch.device,
        progress: ProgressCallback,
        *,
        all_pairs: bool = False,
    ) -> None:
        cache = open_cache(config, weights)
        self.train, self.validation = look_up_splits(config, inputs, cache, device, all_pairs=all_pairs)
        self._splits = {"training": self.train}
        if self.validation is not None:
            self._splits["validation"] = self.validation
        self._cache_dir = cache.directory
        self._progress = progress
        self.num_found = sum(split.num_pairs - split.num_missing for split in self._splits.values())
        self._reference = None
        if any(split.num_missing for split in self._splits.values()):
            # loaded here, not in `run`: a model that cannot be used is reported before anything else starts
            self._reference = build_checked_reference(config, inputs)

    def run(self) -> None:
        """Score the missing pairs, and log how many were cached and how many scored."""
        # the only reference to the model: its memory is free for the policy when this returns
        reference, self._reference = self._reference, None
        if reference is not None:
            for name, split in self._splits.items():
                advance = partial(self._progress, f"scoring the reference: {name} pairs")
                split.score_missing(reference.score, advance=advance)
        logger.info(
            "reference: %s pairs from the cache, %s scored; the cache is %s",
            f"{self.num_found:,}",
            f"{sum(split.num_scored for split in self._splits.values()):,}",
            self._cache_dir,
        )


def look_up_splits(
    config: DPOConfig, inputs: RunInputs, cache: ReferenceCache, device: torch.device, *, all_pairs: bool = False
) -> tuple[PrecomputedReference, PrecomputedReference | None]:
    """Look up the training pairs that the run visits, or all of them, and all validation pairs."""
    train, validation, plan = inputs.train, inputs.validation, inputs.plan

    def look_up(store: PairStore, pair_ids: PairIds, num_visits: int) -> PrecomputedReference:
        blocks = _scored_together(config, inputs, store)
        return PrecomputedReference(cache, store, pair_ids, blocks=blocks, device=device, num_visits=num_visits)

    visited = np.arange(len(train), dtype=np.int64) if all_pairs else plan.visited_pairs()
    return (
        look_up(train, visited, plan.num_visits),
        None
        if validation is None
        else look_up(validation, np.arange(len(validation), dtype=np.int64), len(validation)),
    )


def _scored_together(config: DPOConfig, inputs: RunInputs, store: PairStore) -> Blocks:
    """Score about as many tokens at a time as the policy does: matrix products in bf16 depend on the number of rows."""
    size = config.reference.infer_batch_size
    if size is None and not inputs.layout.needs_pair_attention:
        size = DEFAULT_PAIRS_PER_PADDED_BLOCK
    return scoring_batching(inputs, size).blocks(store.lengths)


def open_cache(config: DPOConfig, weights: str) -> ReferenceCache:
    """Open the cache of this config's reference; it may be empty."""
    model = str(config.reference_path)
    identity = ReferenceFingerprint(
        weights=weights,
        settings=config_digest(model, trust_remote_code=config.trusts_reference_code),
        dtype=config.reference_dtype,
        master_dtype=config.reference_master_dtype,
        scores_prompt=not config.apply_loss_mask,
    )
    return ReferenceCache(cache_root(config.reference_cache_dir), identity, model)
