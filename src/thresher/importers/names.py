"""Other trainers' names in our configs: TRL's in Python, and hints for unknown keys."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from enum import Enum
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thresher.config.section import Section, invalid_config, known_keys, merge_settings, section_at
from thresher.importers.convert import NAMES
from thresher.importers.convert import find_trainer as find_trainer
from thresher.importers.roll import read_own_keys as read_own_keys
from thresher.importers.translation import NEUTRAL, Entry, nest, translate

if TYPE_CHECKING:
    from thresher.config.dpo import DPOConfig

logger = logging.getLogger(__name__)

TRL = NAMES["trl"]
# names of TRL that a run does not use, with their defaults: what save_model and push_to_hub of DPOTrainer do
TRAINER_OPTIONS: dict[str, Any] = {
    **dict.fromkeys(("load_best_model_at_end", "push_to_hub"), False),
    **dict.fromkeys(("hub_model_id", "hub_token", "hub_private_repo", "hub_revision")),
}
# TRL's default of logging_steps, the steps between evaluations of a program that sets neither
_TRL_LOGGING_STEPS = 10
# a name that means one thing here and another in TRL
_AMBIGUOUS = {
    "dtype": "TRL's is the dtype of the weights, thresher's of the computation; set bf16=True, "
    'torch_dtype="bfloat16" or actor_train={"model_args": {"dtype": "bf16"}}'
}
# of equal last parts, the key of the policy: the reference and the validation data follow it unless they are set
_PREFERRED = ("actor_train.training_args.", "actor_train.model_args.", "actor_train.data_args.", "actor_train.")
_HINT_ORDER = ("trl", "llama-factory", "axolotl", "ms-swift", "open-instruct", "colossalchat", "roll")
# spellings that people use and no trainer above has
_COMMON = {
    **dict.fromkeys(("model_path", "model_id"), "pretrain"),
    "epochs": "num_train_epochs",
    "max_len": "sequence_length",
    "max_lr": "actor_train.training_args.learning_rate",
    "use_gradient_checkpointing": "actor_train.training_args.gradient_checkpointing",
    "ref_model_name_or_path": "reference.model_args.model_name_or_path",
    "eval_file": "validation.data_args.file_name",
    "preference_loss": "pref_loss",
    "wandb": "track_with",
}
# arguments of other trainers' Python classes, which no config of theirs has
_REASONS = {
    "start_epoch": "a run resumes from its newest checkpoint by itself; see `resume_from_checkpoint`",
    "use_ref_model": "set `reference.mode`: none trains without a reference",
}


def hint(path: str) -> str | None:
    """Say what a key of another trainer is called here, or why there is none; None for a key that no trainer has."""
    spellings = (path, path.rpartition(".")[2])  # ROLL has sections, the other trainers have flat keys
    if spellings[-1] in _REASONS:
        return _REASONS[spellings[-1]]
    dialects = [NAMES[name] for name in _HINT_ORDER]
    found = [(each.title, rule) for key in spellings for each in dialects if (rule := each.find(key)) is not None]
    target = next((rule.targets[0] for _, rule in found if rule.targets), _COMMON.get(spellings[-1]))
    if target is not None:
        return f"did you mean `{target}`?"
    if not found:
        return None
    title, rule = next((each for each in found if each[1] is not NEUTRAL), found[0])
    if rule is NEUTRAL:
        return f"a key of {title} that changes nothing here; remove it"
    return f"a key of {title} without an equivalent: {rule.note}"


def names_of_other_trainers() -> dict[str, str]:
    """Map the flat keys of other trainers to our keys, for suggestions by spelling."""
    names = dict(_COMMON)
    for name in reversed(_HINT_ORDER):
        names |= {key: rule.targets[0] for key, rule in NAMES[name].table.items() if rule.targets and "." not in key}
    return names


def flat_names() -> dict[str, str]:
    """Map TRL's names to our dotted keys, for values that mean the same in both."""
    return {
        key: rule.targets[0]
        for key, rule in TRL.table.items()
        if rule.targets and rule.function is None and not rule.differs
    }


def from_python(root: type[Section], given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arguments of `DPOConfig(...)` in sections, and the options that only DPOTrainer uses."""
    options = {name: value for name, value in given.items() if name in TRAINER_OPTIONS}
    values = _as_in_trl({name: value for name, value in given.items() if name not in options})
    return (nest_flat_names(root, values) if values.keys() - root.model_fields.keys() else values), options


def _as_in_trl(given: dict[str, Any]) -> dict[str, Any]:
    """Read settings that depend on each other as TRL does."""
    steps = given.get("max_steps")
    if isinstance(steps, int) and steps > 0 and given.get("num_train_epochs") is not None:
        warnings.warn(
            "num_train_epochs has no effect with max_steps, as in TRL: the data repeats for max_steps steps; "
            "remove one of them",
            stacklevel=4,
        )
        given = {name: value for name, value in given.items() if name != "num_train_epochs"}
    if given.get("eval_strategy") == "steps" and given.get("eval_steps") is None:
        given = {**given, "eval_steps": given.get("logging_steps", _TRL_LOGGING_STEPS)}
    return given


def nest_flat_names(root: type[Section], given: Mapping[str, Any]) -> dict[str, Any]:
    """Move settings with flat names into their sections; unknown names are left to validation.

    A name of TRL's whose value means the same is renamed, any other is translated. What has no equivalent is an error
    if it changes the training, otherwise a warning.
    """
    values = {name: value for name, value in given.items() if name in root.model_fields}
    flat = {
        name: value.value if isinstance(value, Enum) else value for name, value in given.items() if name not in values
    }
    if problems := [f"{name}: ambiguous; {_AMBIGUOUS[name]}" for name in flat if name in _AMBIGUOUS]:
        raise invalid_config(problems)
    ours, same = _own_names(root), flat_names()
    foreign = {name: value for name, value in flat.items() if name not in same and TRL.find(name)}
    unknown = {name: value for name, value in flat.items() if name not in {**same, **ours, **foreign}}
    renamed = {name: same.get(name) or ours[name] for name in flat if name not in {**foreign, **unknown}}
    keys = {target: flat[name] for name, target in renamed.items()}
    merged = merge_settings(values, nest(keys), root)
    return merge_settings(merged, nest(_translate(foreign, values, ours)), root) | unknown


def names_in_python(root: type[Section]) -> set[str]:
    """The names that `DPOConfig(...)` accepts."""
    return {*root.model_fields, *_own_names(root), *TRL.table}


def trl_arguments(config: DPOConfig) -> dict[str, Any]:
    """Return the settings under the names of transformers' TrainingArguments, TRL's DPOConfig and ours."""
    renamed = {name: reduce(getattr, key.split("."), config) for name, key in flat_names().items()}
    model, names = config.actor_train.model_args, config.loss_weights
    cadences = ("eval_strategy", "eval_steps"), ("save_strategy", "save_steps")
    return (
        {name: getattr(config, name) for name in type(config).model_fields}
        | renamed
        | TRAINER_OPTIONS
        | config.trainer_options
        | {how: "no" for how, num in cadences if (getattr(config, how), getattr(config, num)) == ("steps", 0)}
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
    keys = [key for key, _ in known_keys(root) if section_at(root, key) is None]
    for key in sorted(keys, key=lambda key: not key.startswith(_PREFERRED)):
        names.setdefault(key.rpartition(".")[2], key)
    return names


def _translate(foreign: Mapping[str, Any], values: Mapping[str, Any], ours: Mapping[str, str]) -> dict[str, Any]:
    """Translate names of TRL's; `values` are thresher's settings that their meaning may depend on."""
    if not foreign:
        return {}
    context = {name: value for name, value in values.items() if TRL.find(name)}
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
        elif entry.outcome in ("different meaning", "no equivalent", "changes nothing here"):
            warnings.warn("; ".join([f"{entry.key}: {entry.outcome}", *entry.notes]), stacklevel=6)
        else:
            for note in entry.notes:
                logger.info("config: %s: %s", entry.key, note)
    if problems:
        raise invalid_config(problems)
    return keys


def _problem(entry: Entry) -> str | None:
    # unlike an imported config, a program runs where its files are
    is_file = isinstance(entry.value, str) and not entry.value.lstrip().startswith("{")
    is_missing = is_file and not Path(entry.value).is_file()
    if entry.key == "deepspeed" and is_missing and (entry.value.endswith(".json") or entry.outcome == "no equivalent"):
        return f"deepspeed: {entry.value} does not exist; give the path of a DeepSpeed config"
    if entry.is_lost:
        return f"{entry.key}: no equivalent; {'; '.join(entry.notes)}"
    if entry.outcome == "no effect" and not entry.notes:
        rule = TRL.find(entry.key)
        needed = " and ".join(rule.targets) if rule else ""
        return f"{entry.key}={entry.value!r} has no effect alone; set {needed}"
    return None
