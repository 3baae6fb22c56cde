"""The lengths of the pairs of a run: of its store, of pairs prepared here if that takes seconds, or assumed."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from thresher.builders.data import data_settings, find_store
from thresher.config import DPOConfig
from thresher.data.prepare.prepare import prepare
from thresher.data.store.reader import Lengths, PairStore
from thresher.errors import UserError

# of data files that are prepared for a plan: about ten seconds
_BYTES_TO_PREPARE = 20e6
_ASSUMED_STEPS = 100


@dataclass(frozen=True)
class PairLengths:
    """lengths: [pairs, (prompt, chosen, rejected)]. source: where they come from, for the report."""

    lengths: Lengths
    source: str
    is_assumed: bool = False


def find_lengths(config: DPOConfig, tokenizer: PreTrainedTokenizerBase, pairs_per_step: int) -> PairLengths:
    """Lengths of the training pairs. Writes nothing into the directories of the run."""
    try:
        store = find_store(config, config.actor_train.data_args, tokenizer)
        if store is not None:
            return PairLengths(_training_lengths(config, store), f"prepared pairs in {store.path}")
        if _is_cheap(config):
            with tempfile.TemporaryDirectory() as directory:
                path = Path(directory) / "store"
                prepare(data_settings(config, config.actor_train.data_args), tokenizer, path)
                lengths = np.array(_training_lengths(config, PairStore.open(path)))
            return PairLengths(lengths, "pairs prepared for this plan")
        reason = "the pairs are not prepared"
    except (UserError, OSError) as error:
        if config.actor_train.data_args.store:
            raise
        reason = f"the pairs cannot be read: {error}"
    return _assumed(config, pairs_per_step, reason)


def _training_lengths(config: DPOConfig, store: PairStore) -> Lengths:
    if config.validation is not None and config.validation.split is not None:
        store = store.split(config.validation.split, config.seed)[0]
    return store.lengths


def _is_cheap(config: DPOConfig) -> bool:
    files = [Path(name) for name in data_settings(config, config.actor_train.data_args).file_name]
    return all(file.is_file() for file in files) and sum(file.stat().st_size for file in files) <= _BYTES_TO_PREPARE


def _assumed(config: DPOConfig, pairs_per_step: int, reason: str) -> PairLengths:
    """Pairs as long as sequence_length allows, half of it prompt: an upper bound."""
    half = config.sequence_length // 2
    num_pairs = pairs_per_step * min(config.max_steps or _ASSUMED_STEPS, _ASSUMED_STEPS)
    lengths = np.full((num_pairs, 3), half, dtype=np.uint32)
    source = f"assumed: {num_pairs:,} pairs of sequence_length {config.sequence_length} tokens, because {reason}"
    return PairLengths(lengths, source, is_assumed=True)
