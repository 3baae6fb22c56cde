"""The grid: every combination of the listed values is a trial, with a readable name, a config, and shared inputs."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from thresher.config import DPOConfig, load_config
from thresher.config.load import sweep_values
from thresher.config.loss import LossConfig
from thresher.errors import UserError

_MAX_NAME = 120
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._=,+-]+")
# these change neither the pairs nor the reference; a setting that is missing here costs a cache lookup, not the result
_NEUTRAL = ("output_dir", "logging_dir", "exp_name", *LossConfig.model_fields)
_NEUTRAL_IN_TRAINING = ("learning_rate", "weight_decay", "warmup_steps", "warmup_ratio", "lr_scheduler_type")


@dataclass(frozen=True)
class Trial:
    """One run of a sweep."""

    name: str
    overrides: tuple[str, ...]  # all settings of the command line, with one value each
    values: Mapping[str, str]  # of the settings with several values


def make_trials(overrides: Sequence[str]) -> list[Trial]:
    """Return the trials in grid order; the last setting's values change fastest."""
    choices = [sweep_values(text) for text in overrides]
    if all(len(each) == 1 for each in choices):
        raise UserError("no setting has several values; list them, such as beta=0.05,0.1, or use `thresher train`")
    swept = [len(each) > 1 for each in choices]
    keys = [_key(text) for text in overrides]
    if twice := [key for key, count in Counter(keys).items() if count > 1]:
        raise UserError(f"{twice[0]} is given twice; list all its values at once")
    leaves = Counter(key.rpartition(".")[2] for key, several in zip(keys, swept, strict=True) if several)
    trials = []
    for combination in itertools.product(*choices):
        values = {
            _short(key, leaves): _value(text)
            for key, text, several in zip(keys, combination, swept, strict=True)
            if several
        }
        trials.append(Trial(_name(values), combination, values))
    if twice := [name for name, count in Counter(trial.name for trial in trials).items() if count > 1]:
        raise UserError(f"the trial {twice[0]} occurs twice; list each value once")
    return trials


def trial_config(path: str | Path, trial: Trial) -> DPOConfig:
    """Load a trial's config: what `thresher train` loads with its settings, in its own directory."""
    config = load_config(path, trial.overrides)
    logging_dir = None if config.logging_dir is None else str(Path(config.logging_dir) / trial.name)
    return config.model_copy(
        update={
            "output_dir": str(Path(config.output_dir) / trial.name),
            "logging_dir": logging_dir,
            "exp_name": f"{config.exp_name}-{trial.name}",  # trackers tell runs apart by it
        }
    )


def distinct_inputs(configs: Sequence[DPOConfig]) -> list[DPOConfig]:
    """Return one config per set of trials that share their pairs and their reference."""
    from thresher.builders.objective import build_objective
    from thresher.builders.reference_mode import reference_mode

    distinct: dict[str, DPOConfig] = {}
    for config in configs:
        values = config.model_dump(mode="json", exclude=set(_NEUTRAL))
        for name in _NEUTRAL_IN_TRAINING:
            values["actor_train"]["training_args"].pop(name, None)
        # the loss decides whether there is a reference
        key = json.dumps([reference_mode(config, build_objective(config)), values], sort_keys=True)
        distinct.setdefault(key, config)
    return list(distinct.values())


def _key(override: str) -> str:
    return override.partition("=")[0].lstrip("+~")


def _value(override: str) -> str:
    value = override.partition("=")[2]
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"" else value


def _short(key: str, leaves: Mapping[str, int]) -> str:
    leaf = key.rpartition(".")[2]
    return leaf if leaves[leaf] == 1 else key


def _name(values: Mapping[str, str]) -> str:
    """Name a directory after the values, with a digest if the name cannot hold them exactly."""
    exact = ",".join(f"{key}={value}" for key, value in values.items())
    name = _NOT_IN_NAMES.sub("-", exact)
    if name == exact and len(name) <= _MAX_NAME:
        return name
    return f"{name[:_MAX_NAME]}-{hashlib.sha256(exact.encode()).hexdigest()[:8]}"
