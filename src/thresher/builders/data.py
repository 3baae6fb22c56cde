"""The pair stores of a run, one for each source or set: opened if they exist, prepared otherwise."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import cast, get_args

import numpy as np
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from thresher.builders.data_parts import DataPart, data_parts, data_settings
from thresher.config import DPOConfig
from thresher.data.batching.curriculum import Curriculum, Key
from thresher.data.batching.plan import Plan, Share
from thresher.data.example import ExampleBatch
from thresher.data.prepare.findings import find_leaks
from thresher.data.prepare.prepare import store_fingerprint, tokenizer_digest
from thresher.data.prepare.report import report_of, truncation_of
from thresher.data.settings import DataSettings
from thresher.data.store.cache import StoreCache
from thresher.data.store.joined import Stores, join
from thresher.data.store.reader import ExampleStore
from thresher.errors import UserError
from thresher.losses.objective import Objective
from thresher.models.loading.load import longrope_limit, max_positions

logger = logging.getLogger(__name__)

StoreBuilder = Callable[[DataSettings, PreTrainedTokenizerBase, Path], object]


def open_stores(
    config: DPOConfig, tokenizer: PreTrainedTokenizerBase, build: StoreBuilder
) -> tuple[Stores, Stores | None]:
    """Open the training and the validation pairs; warn if they overlap, or if many pairs were too long."""
    train = _open_parts(config, data_parts(config), tokenizer, build)
    if config.validation is None:
        return train, None
    if config.validation.split is not None:
        return train.split(config.validation.split, config.seed, Path(config.output_dir) / "data")
    validation = _open_parts(config, data_parts(config, validation=True), tokenizer, build)
    pairs, prompts = find_leaks(train, validation)
    if pairs.count or prompts.count:
        logger.warning(
            "of %s training %s, %s are also in the validation set and %s share a prompt with it; evaluation on "
            "those measures memorization",
            f"{len(train):,}",
            train.unit,
            f"{pairs.count:,}",
            f"{prompts.count:,}",
        )
    return train, validation


def _open_parts(
    config: DPOConfig, parts: Mapping[str, DataPart], tokenizer: PreTrainedTokenizerBase, build: StoreBuilder
) -> Stores:
    stores = {name: _open_store(config, part, tokenizer, build) for name, part in parts.items()}
    for name, part in parts.items():
        _warn_about_truncation(stores[name], part)
    return join(stores)


def shares_of(config: DPOConfig, train: Stores) -> tuple[Share, ...]:
    """How many examples an epoch visits of each source; none if it visits all of one."""
    if not config.actor_train.data_args.sources:
        return ()
    found = []
    for name, part in data_parts(config).items():
        size = len(train.parts[name])
        assert part.share is not None  # noqa: S101  # of a source
        weight = 1.0 if part.share.weight is None else part.share.weight
        count = part.share.count or round(weight * size)
        if count == 0:
            raise UserError(f"{part.named}.weight {weight:g} of {size} {train.unit} is none of them; raise it")
        found.append(Share(size, count))
    return tuple(found)


def build_curriculum(order: str, train: Stores) -> Curriculum | None:
    """The curriculum of data_args.order; None if it is not one."""
    key = order.removeprefix("-")
    return Curriculum(train, cast("Key", key), order != key) if key in get_args(Key) else None


def describe_mixture(train: Stores, plan: Plan) -> str | None:
    """Name the order, and how many examples an epoch visits of each source; None if all are shuffled."""
    order = plan.order if plan.curriculum is None else f"in order of {plan.curriculum.order}"
    if not plan.shares:
        return None if order == "proportional" else order
    shares = (f"{name} {share.count:,} of {share.size:,}" for name, share in zip(train.parts, plan.shares, strict=True))
    return f"{', '.join(shares)}, {order}"


def _warn_about_truncation(store: ExampleStore, part: DataPart) -> None:
    """Warn if many pairs were dropped as too long; in a named store, this depends on the options of `prepare`."""
    role = "validation" if part.split_name == "validation" else "actor_train"
    of_config = ("sequence_length=", f"{role}.data_args.truncation=")
    names = ("--sequence-length ", "--truncation ") if part.args.store else of_config
    try:
        warning = report_of(store).truncation_warning(truncation_of(store), *names)
    except UserError as error:  # the pairs themselves have checksums
        warning = str(error)
    if warning is not None:
        logger.warning("%s: %s", store.path, warning)


def check_examples(
    config: DPOConfig, objective: Objective, model: PreTrainedConfig, stores: Sequence[Stores | None]
) -> None:
    """Reject columns that the losses ignore and pairs longer than the model's context, before training."""
    if any(store is not None and store.has_token_weights for store in stores):
        if objective.trains_rewards:
            raise UserError(
                "the data has token weights, but a reward model scores whole responses; remove chosen_token_weights "
                "and rejected_token_weights from the rows"
            )
        if not config.apply_loss_mask:
            raise UserError(
                "the data has token weights, which apply_loss_mask=false would ignore; remove apply_loss_mask"
            )
    context, longrope = max_positions(model), longrope_limit(model)
    for store in (part for each in stores if each is not None for part in each.parts.values()):
        objective.check_columns(weight="weight" in store.columns_in_use, margin="margin" in store.columns_in_use)
        longest, limit = store.longest_example, config.sequence_length
        found = f"{store.path} contains {store.unit} of up to {longest} tokens"
        if longest > limit:
            raise UserError(
                f"{found}, more than sequence_length {limit}; raise sequence_length or prepare the data again"
            )
        if context is not None and longest > context:
            raise UserError(f"{found}, but the model's context is {context}; set sequence_length={context}")
        if longrope is not None and longest > longrope:
            raise UserError(
                f"{found}, but longrope of the model family {model.model_type} rotates all sequences of a batch "
                f"differently if one has more than {longrope} tokens, so log-probabilities would depend on the "
                f"other examples of the batch; set sequence_length={longrope}"
            )


def probe_examples(store: Stores) -> ExampleBatch:
    """Two pairs to check the model on: those with the shortest and the longest sequence of the first 4096.

    The longest is the most likely to exceed a sliding window, and a difference in length shows a dependence on it.
    """
    lengths = store.lengths[:4096]
    sequences = lengths[:, 0] + lengths[:, 1:].max(axis=1)
    return store.read(np.unique([int(sequences.argmin()), int(sequences.argmax())]))


def open_given_store(config: DPOConfig, path: str, tokenizer: PreTrainedTokenizerBase) -> ExampleStore:
    """Open a store that the config names; reject one of a different tokenizer."""
    store = ExampleStore.open(path)
    if store.tokenizer_digest != tokenizer_digest(tokenizer):
        raise UserError(
            f"the store {path} was not prepared with the policy's tokenizer; prepare it again with "
            f"--model {config.tokenizer_path}"
        )
    return store


def find_store(config: DPOConfig, part: DataPart, tokenizer: PreTrainedTokenizerBase) -> ExampleStore | None:
    """Open the store of this data, tokenizer and settings where it is, without preparing or copying; None if absent."""
    if part.args.store:
        return open_given_store(config, part.args.store, tokenizer)
    fingerprint = store_fingerprint(data_settings(config, part), tokenizer)
    for path in (_store_path(config, part, fingerprint), StoreCache(config.cache_dir).root / fingerprint):
        if path.is_dir():
            return ExampleStore.open(path, expected_fingerprint=fingerprint)
    return None


def _store_path(config: DPOConfig, part: DataPart, fingerprint: str) -> Path:
    """The run's store of this split: data/train-9cd92b7f01aa, or data/9cd92b7f01aa43e5 of a run of earlier versions."""
    directory = Path(config.output_dir) / "data"
    of_earlier_versions = directory / fingerprint[:16]
    if of_earlier_versions.is_dir():
        return of_earlier_versions
    return directory / f"{part.split_name}-{fingerprint[:12]}"


def _open_store(
    config: DPOConfig, part: DataPart, tokenizer: PreTrainedTokenizerBase, build: StoreBuilder
) -> ExampleStore:
    """Open the store of this data, tokenizer and settings; if the run has none, from the cache or newly prepared."""
    if part.args.store:
        return open_given_store(config, part.args.store, tokenizer)
    settings = data_settings(config, part)
    fingerprint = store_fingerprint(settings, tokenizer)
    path = _store_path(config, part, fingerprint)
    if path.exists():
        logger.info("using prepared pairs in %s", path)
        return ExampleStore.open(path, expected_fingerprint=fingerprint)
    cache = StoreCache(config.cache_dir)
    with cache.reserve(fingerprint):
        is_new = not path.exists() and not cache.fetch(fingerprint, path)
        if is_new:
            build(settings, tokenizer, path)
        store = ExampleStore.open(path, expected_fingerprint=fingerprint)
        if is_new:
            cache.add(store)
    return store
