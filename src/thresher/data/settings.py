"""Settings of data preparation, validated on construction; `config/` reads them from configuration files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from thresher.errors import UserError

Truncation = Literal["drop", "prompt_start", "response_end"]
OnBadRow = Literal["fail", "skip", "quarantine"]
SpecialTokensInText = Literal["keep_as_text", "reject"]


# what a source or a set has of its own
OF_EACH_SET = ("file_name", "store", "template", "system_prompt", "max_samples", "columns")
# columns that may have another name
COLUMNS = ("chosen", "rejected", "prompt", "completion", "label", "completions", "scores")


@dataclass(frozen=True)
class DataSettings:
    """The source files and how their rows become pairs."""

    file_name: str | Sequence[str]  # paths, globs or URLs
    template: str = "auto"  # the tokenizer's chat template; or `raw` (plain text), or the path of a Jinja file
    template_arguments: Mapping[str, Any] = field(default_factory=dict)  # variables of it, such as `enable_thinking`
    sequence_length: int | None = 1024  # of the prompt plus the longer response, in tokens; None sets no limit
    truncation: Truncation = "drop"
    on_bad_row: OnBadRow = "fail"
    special_tokens_in_text: SpecialTokensInText = "keep_as_text"  # of a row whose text spells a control token
    chosen_key: str | None = None
    rejected_key: str | None = None
    prompt_key: str | None = None
    completion_key: str | None = None
    label_key: str | None = None
    completions_key: str | None = None
    scores_key: str | None = None
    subset_key: str | None = None  # column with the name of a subset
    order_key: str | None = None  # column with a number by which a curriculum sorts
    system_prompt: str | None = None  # of rows that have none
    join_labelled: bool = False  # rows of one answer and a label become pairs, where a prompt has both labels
    margin_from_scores: bool = False  # the margin of a pair is the difference of its scores
    max_samples: int | None = None  # rows read of each file; None reads all
    # these two never change the pairs, so a store's fingerprint does not include them
    num_processes: int = 1
    shard_rows: int = 524_288  # 191 shards for 100 million pairs: all stay open for random access
    section: str = "actor_train.data_args"  # of the config, for messages
    named: str = ""  # the section of a source or a set, for what it sets itself

    def __post_init__(self) -> None:
        if not self.file_names:
            raise UserError(f"{self.key('file_name')} names no file; give a path, a glob, a URL or a list of them")
        if any(not isinstance(name, str) or not name for name in self.file_names):
            raise UserError(f"{self.key('file_name')} must be one or more file names, got {self.file_name!r}")
        choices = {"truncation": Truncation, "on_bad_row": OnBadRow, "special_tokens_in_text": SpecialTokensInText}
        for name, allowed in choices.items():
            if (value := getattr(self, name)) not in get_args(allowed):
                raise UserError(f"{self.key(name)} is {value!r}; use one of {', '.join(get_args(allowed))}")
        if self.join_labelled and self.extra_columns:
            raise UserError(
                f"{self.key('columns')}: a pair that is joined from labelled rows has no {self.extra_columns[0]}; "
                f"remove it, or {self.key('join_labelled')}"
            )
        for name, minimum in {"sequence_length": 2, "max_samples": 1, "num_processes": 1, "shard_rows": 1}.items():
            value = getattr(self, name)
            if value is not None and value < minimum:
                raise UserError(f"{name} must be at least {minimum}, got {value}")

    def key(self, name: str) -> str:
        """Return the full config key of a setting, for messages."""
        return f"{self.named if self.named and name in OF_EACH_SET else self.section}.{name}"

    @property
    def file_names(self) -> tuple[str, ...]:
        return (self.file_name,) if isinstance(self.file_name, str) else tuple(self.file_name)

    @property
    def extra_columns(self) -> tuple[str, ...]:
        """The columns that the store has besides those of all stores."""
        return tuple(name for name in ("subset", "order") if getattr(self, f"{name}_key"))

    @property
    def extra_keys(self) -> tuple[str, ...]:
        return tuple(getattr(self, f"{name}_key") for name in self.extra_columns)

    @property
    def column_names(self) -> Mapping[str, str]:
        """Map standard column names to the user's, for renamed columns only."""
        keys = {name: getattr(self, f"{name}_key") for name in COLUMNS}
        # `instruction` stays as it is: it selects the format in which `input` is appended to the prompt
        return {name: column for name, column in keys.items() if column and column not in (name, "instruction")}
