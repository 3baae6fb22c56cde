"""Spelling of a config in a checkpoint: keys and values keep the names under which they were first stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from thresher.config.aliases import ALIASES, Aliases
from thresher.config.dpo import DPOConfig
from thresher.config.roles import Axes
from thresher.config.section import Section, inner_section


def to_stored(config: DPOConfig) -> dict[str, Any]:
    """Return the config as JSON values under the stored names."""
    return _respell(config.model_dump(mode="json"), DPOConfig, Aliases.earlier)


def from_stored(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a stored config under the current names. Nothing is validated: it may be of another version."""
    return _respell(values, DPOConfig, Aliases.current)


def _respell(
    values: Mapping[str, Any], section: type[Section], respell: Callable[[Aliases, str, Any], tuple[str, Any]]
) -> dict[str, Any]:
    aliases = ALIASES.get(section.__name__, Aliases())
    respelled = {}
    for key, value in values.items():
        inner = Axes if key == "strategy_config" else inner_section(section, key)
        if inner is not None and isinstance(value, Mapping):
            value = _respell(value, inner, respell)
        key, value = respell(aliases, key, value)
        respelled[key] = value
    return respelled
