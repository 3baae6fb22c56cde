"""What a user may choose about data, checked once: the settings that `prepare` takes.

Reading configuration files is left to `config/`; everything here is plain values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from thresher.errors import UserError

Truncation = Literal["drop", "prompt_start", "response_end"]
OnBadRow = Literal["fail", "skip", "quarantine"]
SpecialTokensInText = Literal["keep_as_text", "reject"]


@dataclass(frozen=True)
class DataSettings:
    """Name the source files and how their rows become pairs.

    file_name: one path, glob or URL, or several; a string is one name, never a list of characters.
    template: `auto` (the tokenizer's chat template), `raw` (plain text) or the path of a Jinja file.
    template_arguments: extra variables of the chat template, such as `enable_thinking`.
    sequence_length: most tokens of prompt plus longer response; None sets no limit.
    special_tokens_in_text: whether a row that spells a control token keeps it as text, or is a bad row.
    num_processes, shard_rows: never change the pairs, so they are no part of a store's identity.
    """

    file_name: str | Sequence[str]
    template: str = "auto"
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    sequence_length: int | None = 1024
    truncation: Truncation = "drop"
    on_bad_row: OnBadRow = "fail"
    special_tokens_in_text: SpecialTokensInText = "keep_as_text"
    chosen_key: str | None = None
    rejected_key: str | None = None
    prompt_key: str | None = None
    num_processes: int = 1
    # 100 million pairs are 191 shards, which all stay open while pairs are read at random
    shard_rows: int = 524_288

    def __post_init__(self) -> None:
        if not self.file_names:
            raise UserError("data_args.file_name names no file; give a path, a glob, a URL or a list of them")
        if any(not isinstance(name, str) or not name for name in self.file_names):
            raise UserError(f"data_args.file_name must hold names of files, got {self.file_name!r}")
        choices = {"truncation": Truncation, "on_bad_row": OnBadRow, "special_tokens_in_text": SpecialTokensInText}
        for name, allowed in choices.items():
            if (chosen := getattr(self, name)) not in get_args(allowed):
                raise UserError(f"data_args.{name} is {chosen!r}; use one of {', '.join(get_args(allowed))}")
        for name, least in {"sequence_length": 2, "num_processes": 1, "shard_rows": 1}.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise UserError(f"{name} must be at least {least}, got {value}")

    @property
    def file_names(self) -> tuple[str, ...]:
        return (self.file_name,) if isinstance(self.file_name, str) else tuple(self.file_name)

    @property
    def column_names(self) -> Mapping[str, str]:
        """Map our names of columns to the user's, for those that the user renamed."""
        keys = {"chosen": self.chosen_key, "rejected": self.rejected_key, "prompt": self.prompt_key}
        # `instruction` is a prompt of its own kind, which `input` joins; naming it renames nothing
        return {ours: theirs for ours, theirs in keys.items() if theirs and theirs not in (ours, "instruction")}
