"""Convert another trainer's config file to ours: read, translate, validate, and write it for people to read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from thresher.config import DPOConfig, LossConfig, parse_config
from thresher.errors import UserError
from thresher.importers import axolotl, colossalchat, llama_factory, ms_swift, nemo_rl, open_instruct, roll, trl
from thresher.importers.read import read_foreign
from thresher.importers.translation import Dialect, Entry, Translation, translate
from thresher.redact import escape_control_chars, redact, redact_text

# trainer, its tables, keys that identify a config (a comma starts another set), and programs that a script runs;
# in the order in which they are tried: the keys of TRL are a part of the others' keys
_TRAINERS: tuple[tuple[str, ModuleType, str, tuple[str, ...]], ...] = (
    ("ROLL", roll, "actor_train", ("start_dpo_pipeline.py",)),
    ("NeMo-RL", nemo_rl, "policy dpo, policy rm", ("run_dpo.py", "run_rm.py")),
    ("axolotl", axolotl, "base_model", ("axolotl train", "axolotl.cli.train")),
    (
        "LLaMA-Factory",
        llama_factory,
        "stage model_name_or_path, pref_beta, finetuning_type",
        ("llamafactory-cli train", "src/train.py"),
    ),
    (
        "ms-swift",
        ms_swift,
        "rlhf_type, model dataset tuner_type, split_dataset_ratio",
        ("swift rlhf", "megatron rlhf", "swift/cli/rlhf.py", "swift/cli/_megatron/rlhf.py"),
    ),
    ("ColossalChat", colossalchat, "pretrain plugin, accumulation_steps lr", ("train_dpo.py",)),
    (
        "open-instruct",
        open_instruct,
        "model_name_or_path max_seq_length, model_name_or_path dataset_mixer_list, model_name_or_path mixer_list, "
        "model_name_or_path num_epochs, model_name_or_path with_tracking",
        ("open_instruct/dpo_tune_cache.py", "open_instruct/dpo.py", "dpo_tune_cache.py", "dpo_tune.py"),
    ),
    (
        "TRL",
        trl,
        "dataset_mixture, dataset_mixer dataset_splits, model_name_or_path dataset_name, model_name_or_path loss_type, "
        "model_name_or_path learning_rate, model_name_or_path datasets",
        ("trl dpo", "scripts/dpo.py"),
    ),
)
DIALECTS = tuple(
    Dialect(
        title.lower(),
        title,
        module.TABLE,
        tuple(module.NEUTRAL.split()),
        module.defaults,
        tuple(frozenset(mark.split()) for mark in marks.split(",")),
        programs,
    )
    for title, module, marks, programs in _TRAINERS
)
NAMES = {dialect.name: dialect for dialect in DIALECTS}
NAMES |= dict.fromkeys(("handbook", "alignment-handbook"), NAMES["trl"])
# a YAML for TRL does not name its config class; a program or --from does
_CLASSES = {
    f"trl-{name}": replace(NAMES["trl"], marks=(), programs=(f"trl {name}", f"scripts/{name}.py"), implied=implied)
    for name, implied in trl.CLASSES.items()
}
NAMES |= _CLASSES
_READ = (*DIALECTS, *_CLASSES.values())

_MODEL = ("pretrain", "layout", "sequence_length", "prompt_key", "chosen_key", "rejected_key")
_ROLES = ("actor_train", "reference", "validation")
_TRACKING = ("logging_dir", "logging_steps", "track_with", "tracker_kwargs")
_IN_ROLE = ("model_args", "data_args", "training_args", "strategy_args", "device_mapping")


class Conversion(NamedTuple):
    """A translated config, and its text as a file."""

    translation: Translation
    text: str


def convert(path: Path, dialect_name: str | None = None) -> Conversion:
    """Translate a config file or a training script; the result is valid."""
    if dialect_name is not None and dialect_name not in NAMES:
        raise UserError(f"unknown dialect {dialect_name}; use one of {', '.join(NAMES)}")
    config = read_foreign(path, (NAMES[dialect_name],) if dialect_name else _READ)
    dialect = config.dialect
    if dialect is None:
        names = ", ".join(dialect.title for dialect in DIALECTS)
        raise UserError(f"{path} is not recognized as a config of {names}; name the trainer with --from")
    translation = translate(dialect, config.values, num_devices=config.num_devices, empty=config.empty)
    parse_config(translation.values)
    return Conversion(translation, "\n".join(_render(translation, path)) + "\n")


def find_trainer(path: Path) -> str | None:
    """Return the title of the trainer whose config a file is; None for ours, and for ROLL's, whose keys are ours."""
    try:
        dialect = read_foreign(path, _READ).dialect
    except UserError:
        return None
    return None if dialect is None or dialect.name == "roll" else dialect.title


def _render(translation: Translation, path: Path) -> Iterator[str]:
    title = translation.dialect.title
    yield f"# Written by `thresher import` from {_one_line(path.name)}, a config of {title}."
    differing = [entry for entry in translation.entries if entry.outcome == "different meaning"]
    for heading, entries in (
        ("Without an equivalent here, though it changes the training", translation.lost),
        ("With a different meaning here", differing),
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


def _lines(values: Mapping[str, Any], comments: Mapping[str, str], prefix: str = "", depth: int = 0) -> Iterator[str]:
    indent = "  " * depth
    for key in sorted(values, key=lambda key: _IN_ROLE.index(key) if key in _IN_ROLE else len(_IN_ROLE)):
        value, dotted = values[key], f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            yield f"{indent}{_scalar(key)}:"
            yield from _lines(value, comments, f"{dotted}.", depth + 1)
        else:
            comment = f"  # {comments[dotted]}" if dotted in comments else ""
            yield f"{indent}{_scalar(key)}: {_scalar(value)}{comment}"


def _scalar(value: Any) -> str:
    import yaml

    text: str = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=float("inf"))
    return text.removesuffix("\n").removesuffix("\n...")


def shown_value(entry: Entry) -> str:
    """Return the value of an entry for a table: short, with secrets masked."""
    text = " ".join(str(redact({entry.key: entry.value})[entry.key]).split())
    text = escape_control_chars(redact_text(text))
    return text if len(text) <= 120 else f"{text[:117]}..."


def _one_line(text: str) -> str:
    return escape_control_chars(" ".join(redact_text(text).split()))
