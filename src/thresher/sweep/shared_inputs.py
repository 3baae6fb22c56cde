"""What the trials of a sweep share: the settings that change neither the pairs nor the reference."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from thresher.builders.objective import build_objective
from thresher.builders.preflight import check_run
from thresher.builders.reference_mode import reference_mode
from thresher.config import DPOConfig
from thresher.config.loss import LossConfig
from thresher.errors import UserError

# a setting that is missing here costs a look into the caches, never a wrong result
_NEUTRAL = ("output_dir", "logging_dir", "exp_name", *LossConfig.model_fields)
_NEUTRAL_IN_TRAINING = ("learning_rate", "weight_decay", "warmup_steps", "warmup_ratio", "lr_scheduler_type")


def check_trials(configs: Mapping[str, DPOConfig]) -> list[str]:
    """Check all trials, given by name, before the first one starts; return the warnings, each once."""
    warnings: dict[str, None] = {}
    for name, config in configs.items():
        try:
            warnings |= dict.fromkeys(check_run(config).warnings)
        except UserError as error:
            raise UserError(f"trial {name}: {error}") from None
    return list(warnings)


def distinct_inputs(configs: Sequence[DPOConfig]) -> list[DPOConfig]:
    """Return one config of each set that has the same pairs and the same reference."""
    distinct: dict[str, DPOConfig] = {}
    for config in configs:
        distinct.setdefault(_key(config), config)
    return list(distinct.values())


def _key(config: DPOConfig) -> str:
    values = config.model_dump(mode="json")
    for name in _NEUTRAL:
        values.pop(name, None)
    for name in _NEUTRAL_IN_TRAINING:
        values["actor_train"]["training_args"].pop(name, None)
    # a loss decides whether there is a reference
    return json.dumps([reference_mode(config, build_objective(config)), values], sort_keys=True)
