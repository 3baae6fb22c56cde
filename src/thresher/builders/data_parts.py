"""What the config says about each store of a run. Imports neither torch nor transformers: the first checks use it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from thresher.config import DataArgs, DPOConfig
from thresher.config.data import Column, SetArgs, SourceArgs
from thresher.data.settings import COLUMNS, DataSettings
from thresher.data.sources.resolve import at_revision, at_split, find_in_directory


@dataclass(frozen=True)
class DataPart:
    """The data of one store: all of a run's training or validation data, one source of a mixture, or one set."""

    args: DataArgs
    section: str  # of the config, with what all parts share
    named: str = ""  # the section of a source or a set
    columns: Mapping[Column, str] = field(default_factory=dict)  # by their usual name, before chosen_key and the like
    share: SourceArgs | None = None  # of a source in the mixture

    @property
    def split_name(self) -> str:
        return "validation" if self.section.startswith("validation") else "train"


def data_parts(config: DPOConfig, *, validation: bool = False) -> dict[str, DataPart]:
    """The parts of the training or the validation data by name; data without names is one part, named ``.

    There are none for validation pairs that are held out, or without validation.
    """
    if not validation:
        args: DataArgs = config.actor_train.data_args
        section, sets = "actor_train.data_args", cast("Mapping[str, SetArgs]", config.actor_train.data_args.sources)
    elif config.validation is None or config.validation.split is not None:
        return {}
    else:
        args, section, sets = config.validation.data_args, "validation.data_args", config.validation.sets
    if not sets:
        return {"": DataPart(args, section)}
    named = "validation.sets" if validation else "actor_train.data_args.sources"
    return {
        name: DataPart(
            _args_of(each, args),
            section,
            f"{named}.{name}",
            each.columns,
            each if isinstance(each, SourceArgs) else None,
        )
        for name, each in sets.items()
    }


def _args_of(each: SetArgs, args: DataArgs) -> DataArgs:
    """Return data_args with what a source sets itself."""
    files = [at_split(name, each.split) for name in each.file_name]
    own = {name: getattr(each, name) for name in ("template", "system_prompt", "max_samples", "revision", "store")}
    given = {name: value for name, value in own.items() if value is not None}
    return args.model_copy(update={**given, "file_name": files})


def data_settings(config: DPOConfig, part: DataPart) -> DataSettings:
    args = part.args
    columns: dict[str, Any] = {f"{name}_key": getattr(config, f"{name}_key") for name in COLUMNS}
    columns |= {f"{name}_key": column for name, column in part.columns.items()}
    return DataSettings(
        file_name=[at_revision(find_in_directory(name, args.dataset_dir), args.revision) for name in args.file_name],
        template=args.template,
        template_arguments=args.template_arguments,
        sequence_length=config.sequence_length,
        truncation=args.truncation,
        on_bad_row=args.on_bad_row,
        special_tokens_in_text=args.special_tokens_in_text,
        **columns,
        system_prompt=args.system_prompt,
        join_labelled=args.join_labelled,
        margin_from_scores=args.margin_from_scores,
        max_samples=args.max_samples,
        num_processes=args.preprocessing_num_workers,
        section=part.section,
        named=part.named,
    )
