"""A config of another trainer, imported in a temporary directory."""

from __future__ import annotations

from pathlib import Path

from thresher.config import load_config, parse_config
from thresher.importers.convert import Conversion, convert
from thresher.importers.translation import Entry

TRAINING = "actor_train.training_args."
MODEL = "actor_train.model_args."
FILES = "actor_train.data_args.file_name"


def imported(tmp_path: Path, text: str, name: str = "theirs.yaml", dialect: str | None = None) -> Conversion:
    path = tmp_path / name
    path.write_text(text)
    conversion = convert(path, dialect)
    written = tmp_path / "ours.yaml"
    written.write_text(conversion.text)
    assert load_config(written) == parse_config(conversion.translation.values)
    return conversion


def value(conversion: Conversion, key: str) -> object:
    return conversion.translation.value(key)


def entry(conversion: Conversion, key: str) -> Entry:
    return next(each for each in conversion.translation.entries if each.key == key)


def lost(conversion: Conversion) -> set[str]:
    return {each.key for each in conversion.translation.lost}
