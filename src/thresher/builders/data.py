"""The pair stores of a run: opened if they exist, prepared otherwise."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from thresher.config import DataArgs, DPOConfig
from thresher.data.example import ExampleBatch
from thresher.data.prepare.findings import find_leaks
from thresher.data.prepare.prepare import store_fingerprint, tokenizer_digest
from thresher.data.prepare.report import report_of, truncation_of
from thresher.data.settings import DataSettings
from thresher.data.sources.resolve import at_revision, find_in_directory
from thresher.data.store.cache import StoreCache
from thresher.data.store.reader import ExampleStore
from thresher.errors import UserError
from thresher.losses.objective import Objective
from thresher.models.loading.load import longrope_limit, max_positions

logger = logging.getLogger(__name__)

StoreBuilder = Callable[[DataSettings, PreTrainedTokenizerBase, Path], object]


def data_settings(config: DPOConfig, args: DataArgs) -> DataSettings:
    return DataSettings(
        file_name=[at_revision(find_in_directory(name, args.dataset_dir), args.revision) for name in args.file_name],
        template=args.template,
        template_arguments=args.template_arguments,
        sequence_length=config.sequence_length,
        truncation=args.truncation,
        on_bad_row=args.on_bad_row,
        special_tokens_in_text=args.special_tokens_in_text,
        chosen_key=config.chosen_key,
        rejected_key=config.rejected_key,
        prompt_key=config.prompt_key,
        completion_key=config.completion_key,
        label_key=config.label_key,
        completions_key=config.completions_key,
        scores_key=config.scores_key,
        system_prompt=args.system_prompt,
        join_labelled=args.join_labelled,
        margin_from_scores=args.margin_from_scores,
        max_samples=args.max_samples,
        num_processes=args.preprocessing_num_workers,
        section="validation" if config.validation and args is config.validation.data_args else "actor_train",
    )


def open_stores(
    config: DPOConfig, tokenizer: PreTrainedTokenizerBase, build: StoreBuilder
) -> tuple[ExampleStore, ExampleStore | None]:
    """Open the training and the validation pairs; warn if they overlap, or if many pairs were too long."""
    train = _open_store(config, config.actor_train.data_args, tokenizer, build)
    _warn_about_truncation(train, "actor_train", config.actor_train.data_args)
    if config.validation is None:
        return train, None
    if config.validation.split is not None:
        return train.split(config.validation.split, config.seed)
    validation = _open_store(config, config.validation.data_args, tokenizer, build)
    _warn_about_truncation(validation, "validation", config.validation.data_args)
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


def _warn_about_truncation(store: ExampleStore, role: str, args: DataArgs) -> None:
    """Warn if many pairs were dropped as too long; in a named store, this depends on the options of `prepare`."""
    names = (
        ("--sequence-length ", "--truncation ") if args.store else ("sequence_length=", f"{role}.data_args.truncation=")
    )
    try:
        warning = report_of(store).truncation_warning(truncation_of(store), *names)
    except UserError as error:  # the pairs themselves have checksums
        warning = str(error)
    if warning is not None:
        logger.warning("%s: %s", store.path, warning)


def check_examples(
    config: DPOConfig, objective: Objective, model: PreTrainedConfig, stores: Sequence[ExampleStore | None]
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
    for store in stores:
        if store is None:
            continue
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


def probe_examples(store: ExampleStore) -> ExampleBatch:
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


def find_store(config: DPOConfig, args: DataArgs, tokenizer: PreTrainedTokenizerBase) -> ExampleStore | None:
    """Open the store of this data, tokenizer and settings where it is, without preparing or copying; None if absent."""
    if args.store:
        return open_given_store(config, args.store, tokenizer)
    fingerprint = store_fingerprint(data_settings(config, args), tokenizer)
    for path in (_store_path(config, args, fingerprint), StoreCache(config.cache_dir).root / fingerprint):
        if path.is_dir():
            return ExampleStore.open(path, expected_fingerprint=fingerprint)
    return None


def _store_path(config: DPOConfig, args: DataArgs, fingerprint: str) -> Path:
    """The run's store of this split: data/train-9cd92b7f01aa, or data/9cd92b7f01aa43e5 of a run of earlier versions."""
    directory = Path(config.output_dir) / "data"
    of_earlier_versions = directory / fingerprint[:16]
    if of_earlier_versions.is_dir():
        return of_earlier_versions
    split = "train" if args is config.actor_train.data_args else "validation"
    return directory / f"{split}-{fingerprint[:12]}"


def _open_store(
    config: DPOConfig, args: DataArgs, tokenizer: PreTrainedTokenizerBase, build: StoreBuilder
) -> ExampleStore:
    """Open the store of this data, tokenizer and settings; if the run has none, from the cache or newly prepared."""
    if args.store:
        return open_given_store(config, args.store, tokenizer)
    settings = data_settings(config, args)
    fingerprint = store_fingerprint(settings, tokenizer)
    path = _store_path(config, args, fingerprint)
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
