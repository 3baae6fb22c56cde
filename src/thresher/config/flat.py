"""Flat names of settings in Python: those of TRL, and the last part of our dotted keys."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from enum import Enum
from functools import reduce
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from thresher.config.aliases import ALIASES
from thresher.config.dialects.hints import flat_names
from thresher.config.dialects.rules import find_rule
from thresher.config.dialects.translation import Entry, nest, translate
from thresher.config.dialects.trl import TRL
from thresher.config.section import Section, inner_section, known_keys
from thresher.errors import UserError

if TYPE_CHECKING:
    from thresher.config.dpo import DPOConfig

logger = logging.getLogger(__name__)

# a name that means one thing here and another in TRL
_AMBIGUOUS = {
    "dtype": "TRL's is the dtype of the weights, ours that of the computation; set bf16=True, "
    'torch_dtype="bfloat16" or actor_train={"model_args": {"dtype": "bf16"}}'
}
# of equal last parts, the key of the policy: the reference and the validation data follow it unless they are set
_PREFERRED = ("actor_train.training_args.", "actor_train.model_args.", "actor_train.data_args.", "actor_train.")


def nest_flat_names(root: type[Section], given: Mapping[str, Any]) -> dict[str, Any]:
    """Move settings with flat names into their sections; unknown names are left to validation.

    A name of TRL's whose value means the same is renamed, any other is translated. What has no equivalent is an error
    if it changes the training, otherwise a warning.
    """
    known = root.model_fields.keys() | ALIASES[root.__name__].keys.keys()
    values = {name: value for name, value in given.items() if name in known}
    flat = {
        name: value.value if isinstance(value, Enum) else value for name, value in given.items() if name not in known
    }
    if problems := [f"{name}: ambiguous; {_AMBIGUOUS[name]}" for name in flat if name in _AMBIGUOUS]:
        raise _invalid(problems)
    ours, same = _own_names(root), flat_names()
    foreign = {name: value for name, value in flat.items() if name not in same and find_rule(TRL.table, name)}
    unknown = {name: value for name, value in flat.items() if name not in {**same, **ours, **foreign}}
    renamed = {name: same.get(name) or ours[name] for name in flat if name not in {**foreign, **unknown}}
    keys = {target: flat[name] for name, target in renamed.items()}
    merged = merge_settings(values, nest(keys), root)
    return merge_settings(merged, nest(_translate(foreign, values, ours)), root) | unknown


def names_in_python(root: type[Section]) -> set[str]:
    """The names that `DPOConfig(...)` accepts."""
    return {*root.model_fields, *_own_names(root), *(name for name in TRL.table if not name.endswith("*"))}


def trl_arguments(config: DPOConfig) -> SimpleNamespace:
    """The settings under the names of transformers' TrainingArguments and TRL's DPOConfig, and those of ours."""
    renamed = {name: reduce(getattr, key.split("."), config) for name, key in flat_names().items()}
    model, names = config.actor_train.model_args, config.loss_weights
    is_cadence_off = {
        name: (getattr(config, f"{name}_strategy"), getattr(config, f"{name}_steps")) == ("steps", 0)
        for name in ("eval", "save")
    }
    return SimpleNamespace(
        **{name: getattr(config, name) for name in type(config).model_fields}
        | renamed
        | config.trainer_options
        | {f"{name}_strategy": "no" for name, is_off in is_cadence_off.items() if is_off}
        | {
            "max_steps": config.max_steps or -1,
            "gradient_checkpointing": config.actor_train.training_args.gradient_checkpointing != "off",
            "metric_for_best_model": config.metric_for_best_model.replace("eval/", "eval_", 1),
            "bf16": model.dtype == "bf16",
            "fp16": model.dtype == "fp16",
            "loss_type": list(names),
            "loss_weights": list(names.values()),
            "report_to": [name for name in config.track_with if name != "console"],
            "model_init_kwargs": None,
        }
    )


def _own_names(root: type[Section]) -> dict[str, str]:
    """Map the last part of each of our keys to the key."""
    names: dict[str, str] = {}
    keys = [key for key, _ in known_keys(root) if _section_at(root, key) is None]
    for key in sorted(keys, key=lambda key: not key.startswith(_PREFERRED)):
        names.setdefault(key.rpartition(".")[2], key)
    return names


def _section_at(root: type[Section], key: str) -> type[Section] | None:
    """Return the section at a dotted key; None if it holds a value."""
    section: type[Section] | None = root
    for part in key.split("."):
        section = None if section is None else inner_section(section, part)
    return section


def _translate(foreign: Mapping[str, Any], values: Mapping[str, Any], ours: Mapping[str, str]) -> dict[str, Any]:
    """Translate names of TRL's; `values` are settings of ours that their meaning may depend on."""
    if not foreign:
        return {}
    context = {name: value for name, value in values.items() if find_rule(TRL.table, name)}
    run = translate(TRL, {**context, **foreign}, with_defaults=False)
    keys: dict[str, Any] = {}
    problems: list[str] = []
    for entry in run.entries:
        if entry.key not in foreign:
            continue
        keys |= {target: run.value(target) for target in entry.targets if target not in values}
        if entry.outcome == "no effect" and entry.key in ours:
            keys[ours[entry.key]] = entry.value  # such as lora_alpha, which TRL reads with use_peft only
        elif text := _problem(entry):
            problems.append(text)
        elif entry.outcome in ("different meaning", "no equivalent"):
            warnings.warn(f"{entry.key}: {entry.outcome}; {'; '.join(entry.notes)}", stacklevel=4)
        else:
            for note in entry.notes:
                logger.info("config: %s: %s", entry.key, note)
    if problems:
        raise _invalid(problems)
    return keys


def _problem(entry: Entry) -> str | None:
    if entry.key == "deepspeed" and _is_missing(entry):
        return f"deepspeed: {entry.value} does not exist; give the path of a DeepSpeed config"
    if entry.is_lost:
        return f"{entry.key}: no equivalent; {'; '.join(entry.notes)}"
    if entry.outcome == "no effect" and not entry.notes:
        rule = find_rule(TRL.table, entry.key)
        needed = " and ".join(rule.targets) if rule else ""
        return f"{entry.key}={entry.value!r} has no effect alone; set {needed}"
    return None


def _is_missing(entry: Entry) -> bool:
    """Whether a file is not here; unlike an imported config, a program runs where its files are."""
    value = entry.value
    named = isinstance(value, str) and not value.lstrip().startswith("{")
    return named and not Path(value).is_file() and (value.endswith(".json") or entry.outcome == "no equivalent")


def _invalid(problems: list[str]) -> UserError:
    return UserError("invalid configuration:\n" + "\n".join(f"  - {problem}" for problem in problems))


def merge_settings(
    values: Mapping[str, Any], added: Mapping[str, Any], root: type[Section], prefix: str = ""
) -> dict[str, Any]:
    """Add nested values; a key that is set already must have the same value."""
    merged = dict(values)
    for name, value in added.items():
        present = merged.get(name)
        if isinstance(present, Section):
            present = present.model_dump(exclude_unset=True)
        if present is None:
            merged[name] = value
        elif isinstance(value, dict) and isinstance(present, dict) and _section_at(root, f"{prefix}{name}"):
            merged[name] = merge_settings(present, value, root, f"{prefix}{name}.")
        elif present != value:
            raise UserError(f"{prefix}{name} is set twice, to {present!r} and to {value!r}; keep one")
    return merged
