"""Convert a config file of another trainer to ours: read, translate, validate, and write it for people to read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from thresher.config.dialects.read import DIALECTS, NAMES, read_foreign
from thresher.config.dialects.roll import ROLL
from thresher.config.dialects.rules import to
from thresher.config.dialects.translation import Dialect, Entry, Translation, translate
from thresher.config.dpo import DPOConfig, LossConfig
from thresher.config.load import parse_config
from thresher.config.section import known_keys
from thresher.errors import UserError
from thresher.redact import escape_control_chars, redact, redact_text

_MODEL = ("pretrain", "layout", "sequence_length", "prompt_key", "chosen_key", "rejected_key")
_ROLES = ("actor_train", "reference", "validation")
_TRACKING = ("logging_dir", "logging_steps", "track_with", "tracker_kwargs")
_IN_ROLE = ("model_args", "data_args", "training_args", "strategy_args", "device_mapping")


@dataclass(frozen=True)
class Conversion:
    """A translated config: its text, and what became of each key."""

    dialect: Dialect
    translation: Translation
    text: str

    @property
    def entries(self) -> list[Entry]:
        return self.translation.entries

    @property
    def lost(self) -> list[Entry]:
        return self.translation.lost


def convert(path: Path, dialect_name: str | None = None) -> Conversion:
    """Translate a config file or a training script; the result is valid."""
    if dialect_name is not None and dialect_name not in NAMES:
        raise UserError(f"unknown dialect {dialect_name}; use one of {', '.join(NAMES)}")
    config = read_foreign(path, NAMES.get(dialect_name or ""))
    dialect = config.dialect
    if dialect is None:
        names = ", ".join(dialect.title for dialect in DIALECTS)
        raise UserError(f"{path} is not recognized as a config of {names}; name the trainer with --from")
    if dialect is ROLL:
        dialect = replace(ROLL, table={**_our_keys(), **ROLL.table})
    translation = translate(dialect, config.values, num_devices=config.num_devices, empty=config.empty)
    parse_config(translation.values)
    return Conversion(dialect, translation, "\n".join(_render(translation, path)) + "\n")


def _our_keys() -> dict[str, Any]:
    """Keys of ours that ROLL does not have, for a config that mixes both."""
    keys = [key for key, _ in known_keys(DPOConfig)]
    sections = {key.rpartition(".")[0] for key in keys}
    return {key: to(key) for key in keys if key not in sections}


def _render(translation: Translation, path: Path) -> Iterator[str]:
    title = translation.dialect.title
    yield f"# Written by `thresher import` from {_one_line(path.name)}, a config of {title}."
    differing = [entry for entry in translation.entries if entry.outcome == "different meaning"]
    for heading, entries in (
        ("Without an equivalent here, though it changes the training", translation.lost),
        ("With another meaning here", differing),
    ):
        if entries:
            yield "#"
            yield f"# {heading}:"
            yield from (f"#   {_one_line(entry.key)}: {_one_line('; '.join(entry.notes))}" for entry in entries)
    comments = dict.fromkeys(translation.defaults_written, f"default of {title}")
    values = translation.values
    losses = [key for key in LossConfig.model_fields if key in values]
    others = [key for key in DPOConfig.model_fields if key not in {*_MODEL, *losses, *_ROLES, *_TRACKING}]
    for group in (_MODEL, losses, others, *([role] for role in _ROLES), _TRACKING):
        chosen = {key: values[key] for key in group if key in values}
        if chosen:
            yield ""
            yield from _lines(chosen, comments)


def _lines(values: Mapping[str, Any], comments: Mapping[str, str], prefix: str = "") -> Iterator[str]:
    indent = "  " * prefix.count(".")
    for key in sorted(values, key=lambda key: _IN_ROLE.index(key) if key in _IN_ROLE else len(_IN_ROLE)):
        value, dotted = values[key], f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            yield f"{indent}{key}:"
            yield from _lines(value, comments, f"{dotted}.")
        else:
            comment = f"  # {comments[dotted]}" if dotted in comments else ""
            yield f"{indent}{key}: {_scalar(value)}{comment}"


def _scalar(value: Any) -> str:
    import yaml

    text: str = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=float("inf"))
    return text.removesuffix("\n").removesuffix("\n...")


def shown_value(entry: Entry) -> str:
    """Return the value of an entry for a table: short, with secrets masked."""
    text = " ".join(str(redact({entry.key: entry.value})[entry.key]).split())
    text = escape_control_chars(redact_text(text))
    return text if len(text) <= 60 else f"{text[:57]}..."


def _one_line(text: str) -> str:
    return escape_control_chars(" ".join(redact_text(text).split()))
