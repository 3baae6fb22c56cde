"""Spelling of a config in a checkpoint: keys and values keep the names under which they were first stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from thresher.config.aliases import ALIASES, Aliases
from thresher.config.dpo import DPOConfig
from thresher.config.section import Section, inner_section
from thresher.config.strategies import DEFAULT_TRAIN, find_strategy


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
        inner = section_at(section, key, values)
        if inner is not None and isinstance(value, Mapping):
            value = _respell(value, inner, respell)
        key, value = respell(aliases, key, value)
        respelled[key] = value
    return respelled


def section_at(section: type[Section] | None, key: str, values: Mapping[str, Any]) -> type[Section] | None:
    """Return the section that a key holds; None for a plain value, and settings of a strategy not installed here.

    values: of `section`, which name the strategy.
    """
    if section is None or key != "strategy_config":
        return None if section is None else inner_section(section, key)
    try:
        return find_strategy(values.get("strategy_name") or DEFAULT_TRAIN).settings
    except (ValueError, TypeError):  # TypeError: the name in a damaged file may be a list
        return None
