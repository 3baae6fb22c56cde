"""The table of accepted spellings: earlier names of keys and values, and shorthands.

Every section resolves its aliases before validation, so they work in YAML, in overrides and in Python. Files on disk
keep the earlier names and values (`config/stored.py`): do not remove an entry while such files exist.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

logger = logging.getLogger(__name__)


class Aliases(NamedTuple):
    """Accepted spellings of one section.

    keys: earlier key to key. values: for a key, earlier value to value. shorthands: for a key, accepted value to what
    it means; unlike `values`, a shorthand is never written to a file.
    """

    keys: Mapping[str, str] = {}
    values: Mapping[str, Mapping[Any, str]] = {}
    shorthands: Mapping[str, Mapping[Any, Any]] = {}

    def current(self, key: str, value: Any) -> tuple[str, Any]:
        """Replace an earlier key or value by the current one."""
        key = self.keys.get(key, key)
        return key, _replace(value, self.values.get(key, {}))

    def earlier(self, key: str, value: Any) -> tuple[str, Any]:
        """Undo `current`."""
        value = _replace(value, {new: old for old, new in self.values.get(key, {}).items()})
        return next((old for old, new in self.keys.items() if new == key), key), value


_REWARDS = ("accuracies", "margins", "chosen", "rejected")
# by the name of the section's class
ALIASES = {
    "DPOConfig": Aliases(
        keys={
            "stop_deadline": "graceful_stop_timeout",
            "hang_timeout": "heartbeat_timeout",
            "max_skipped_steps": "max_consecutive_skipped_steps",
            "metric_for_best": "metric_for_best_model",
        },
        shorthands={
            "max_steps": {-1: None},
            "num_train_epochs": {-1: None},
            # the names of transformers
            "metric_for_best_model": {
                f"{prefix}{name}": f"eval/{name}"
                for prefix in ("", "eval_")
                for name in ("loss", "sft_loss", *(f"rewards/{each}" for each in _REWARDS))
            },
            "resume_from_checkpoint": {"false": False, "False": False, "": False, True: "auto"},
        },
    ),
    "ReferenceConfig": Aliases(keys={"steps_ahead": "prefetch_steps"}),
    # YAML also reads `off` as false
    "TrainingArgs": Aliases(values={"gradient_checkpointing": {True: "full", False: "off"}}),
    "DataArgs": Aliases(values={"special_tokens_in_text": {"text": "keep_as_text", "refuse": "reject"}}),
    "FSDP2Settings": Aliases(keys={"pp_chunks": "virtual_pp_size"}),
}


# names of losses in TRL, ColossalChat and open-instruct; a config keeps ours
LOSS_NAMES = {
    "dpo": "sigmoid",
    "dpo_loss": "sigmoid",
    "dpo_norm": "sigmoid_norm",
    "simpo_loss": "simpo",
    "orpo_loss": "orpo",
    "aot_pair": "aot",
}


def resolve_loss_names(given: Any) -> Any:
    """Return a loss name, a list of names or a mapping of names to weights under our names."""
    if isinstance(given, list):
        return [_replace(name, LOSS_NAMES) for name in given]
    if not isinstance(given, dict):
        return _replace(given, LOSS_NAMES)
    named = {_replace(name, LOSS_NAMES): weight for name, weight in given.items()}
    if len(named) < len(given):
        raise ValueError(f"pref_loss names a loss twice: {' + '.join(map(str, given))}; name each loss once")
    return named


def resolve_aliases(section: str, values: dict[str, Any]) -> dict[str, Any]:
    """Return a section's values under the current spellings; a key given under both of its names is an error."""
    aliases = ALIASES.get(section, Aliases())
    resolved = {}
    for given, value in values.items():
        key, value = aliases.current(given, value)
        if key != given:
            if key in values:
                raise ValueError(f"{given} and {key} are both set; {given} is the earlier name of {key}, keep {key}")
            logger.debug("config key %s is read as %s", given, key)
        resolved[key] = _replace(value, aliases.shorthands.get(key, {}))
    return resolved


def _replace(value: Any, table: Mapping[Any, Any]) -> Any:
    # compared, not looked up: a value of a wrong type may not be hashable
    return next((meant for spelled, meant in table.items() if value == spelled), value)
