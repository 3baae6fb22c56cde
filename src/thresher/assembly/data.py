"""The stores of a run: opened where they exist, prepared where they do not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from thresher.config import DataArgs, DPOConfig
from thresher.data.prepare import PrepareReport, prepare, store_identity
from thresher.data.settings import DataSettings
from thresher.data.store import PairStore


def data_settings(config: DPOConfig, args: DataArgs) -> DataSettings:
    return DataSettings(
        file_name=args.file_name,
        template=args.template,
        sequence_length=config.sequence_length,
        truncation=args.truncation,
        on_bad_row=args.on_bad_row,
        chosen_key=config.chosen_key,
        rejected_key=config.rejected_key,
        prompt_key=config.prompt_key,
        num_processes=args.preprocessing_num_workers,
    )


def open_store(
    config: DPOConfig,
    args: DataArgs,
    tokenizer: PreTrainedTokenizerBase,
    announce: Callable[[str], None],
    report: Callable[[PrepareReport], None],
) -> PairStore:
    """Open a prepared store, preparing it first where none fits the data, tokenizer and settings."""
    if args.store:
        return PairStore.open(args.store)
    settings = data_settings(config, args)
    identity = store_identity(settings, tokenizer)
    path = Path(config.output_dir) / "data" / identity[:16]
    if path.exists():
        announce(f"using the pairs prepared in {path}")
    else:
        report(prepare(settings, tokenizer, path))
    return PairStore.open(path, expected_identity=identity)
