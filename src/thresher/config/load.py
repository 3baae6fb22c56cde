"""Load a config: a YAML file composed by Hydra with `key=value` overrides, validated once."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from thresher.config.dpo import DPOConfig
from thresher.config.loss import with_digests
from thresher.config.section import readable_errors
from thresher.errors import UserError
from thresher.foreign_names import foreign
from thresher.redact import redact_overrides

logger = logging.getLogger(__name__)

# raised by Hydra on defaults lists and nesting that it does not check
_UNFORESEEN = (TypeError, AttributeError, KeyError, AssertionError, RecursionError)
_MAX_VALUES = 1_000_000


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> DPOConfig:
    """Compose a YAML file with overrides and validate the result.

    Args:
        path: the YAML file.
        overrides: settings that replace the file's, such as `beta=0.2`.
    """
    check_yaml_size(Path(path))
    try:
        return parse_config(compose_yaml(Path(path), overrides))
    except UserError:
        trainer = foreign().find_trainer(Path(path))
        if trainer is None:
            raise
        raise UserError(
            f"{path} is a config of {trainer}; convert it with: thresher import {path} -o dpo.yaml"
        ) from None


def parse_config(values: Mapping[str, Any]) -> DPOConfig:
    """Validate plain values; all errors are reported in one message. Keys of ROLL are read, with a note on each."""
    if isinstance(values, Mapping):
        values, notes = foreign().read_own_keys(values)
        values = with_digests(values)
        for note in notes:
            logger.info("config: %s", note)
    try:
        return DPOConfig.model_validate(values)
    except ValidationError as error:
        raise readable_errors(error, DPOConfig) from None


def check_yaml_size(path: Path) -> None:
    """Reject a file whose aliases stand for more values than a config can have; a parser would take all memory."""
    import yaml

    if not path.is_file() or path.suffix not in (".yaml", ".yml"):
        return
    try:
        root = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except (OSError, ValueError, yaml.YAMLError, RecursionError):  # the parser of configs reports it
        return
    sizes: dict[int, int] = {}

    def size_of(node: yaml.Node | None) -> int:
        if not isinstance(node, yaml.CollectionNode):
            return 1
        if id(node) not in sizes:
            sizes[id(node)] = 1  # of a node that contains itself, which the parser rejects
            is_list = isinstance(node, yaml.SequenceNode)
            parts = node.value if is_list else [part for pair in node.value for part in pair]
            sizes[id(node)] = 1 + sum(map(size_of, parts))
        return sizes[id(node)]

    if (size := size_of(root)) > _MAX_VALUES:
        raise UserError(
            f"config {path} has {size:,} values, most of them aliases (*name); write out what they stand for"
        )


def compose_yaml(path: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Return the values of a YAML file after Hydra resolved defaults lists, interpolations and overrides."""
    from hydra import compose, initialize_config_dir
    from hydra.core.config_store import ConfigStore
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException, MissingConfigException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    if not path.is_file():
        raise UserError(f"config file {path} does not exist; give the path of a YAML file")
    if path.suffix not in (".yaml", ".yml"):
        raise UserError(f"config file {path} does not end in `.yaml` or `.yml`; rename it")
    GlobalHydra.instance().clear()
    try:
        if path.suffix == ".yml":  # Hydra opens .yaml files only, and finds a stored config under any name
            ConfigStore.instance().store(path.name, OmegaConf.load(path))
        with initialize_config_dir(config_dir=str(path.parent.resolve()), version_base="1.3"):
            composed = compose(path.name, overrides=[_added(text, path.parent) for text in overrides])
        values = OmegaConf.to_container(composed, resolve=True)
    except MissingConfigException as error:
        here = ", ".join(error.options or ())
        hint = f"use one of {here}" if here else "copy it too, or remove it from `defaults` and write its settings here"
        missing = redact_overrides(str(error.missing_cfg_file), overrides)
        raise UserError(f"config {path} includes {missing}, which does not exist; {hint}") from None
    # OSError: the file is unreadable or not a mapping
    except (HydraException, OmegaConfBaseException, YAMLError, ValueError, OSError, *_UNFORESEEN) as error:
        raise UserError(f"config {path} cannot be read: {redact_overrides(str(error).strip(), overrides)}") from None
    if not isinstance(values, dict):
        raise UserError(f"config {path} holds a {type(values).__name__}; it must be a mapping of keys")
    return {str(key): value for key, value in values.items()}


def _added(override: str, config_dir: Path) -> str:
    """Prefix an override so that it may add a key; validation rejects unknown keys."""
    if override.startswith("~"):
        return override
    key, separator, value = override.partition("=")
    if not separator or not key.strip("+ "):
        raise UserError(f"override {override!r} is not of the form key=value")
    if key.endswith("device_mapping") and "(" in value and not value.startswith(("'", '"')):
        override = f'{key}="{value}"'  # Hydra would parse `list(range(0,8))` as one of its functions
    override = _quoted(override)
    is_group = (config_dir / key.partition("@")[0]).is_dir()
    return override if is_group or override.startswith("+") else f"++{override}"


def sweep_values(override: str) -> list[str]:
    """Return an override once per value that it lists, such as `beta=0.1,0.2`; one with a single value as it is."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    key, _, value = override.partition("=")
    if key.endswith("device_mapping") and "(" in value:  # Python's `list(range(0,8))`, one value
        return [override]
    try:
        parsed = OverridesParser.create().parse_override(override)
    except HydraException as error:
        if "does not support" in str(error) or "interval" in value:
            shown = redact_overrides(f"override {override!r} has no list of values", [override])
            raise UserError(f"{shown}; write the values, separated by commas") from None
        return [override]  # one value, which may be text that needs quotes; loading the config reports the rest
    return [f"{key}={each}" for each in parsed.sweep_string_iterator()] if parsed.is_sweep_override() else [override]


def _quoted(override: str) -> str:
    """Quote a value that Hydra cannot parse but that can only be text, such as `<pad>`: the shell removes quotes."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        parsed = OverridesParser.create().parse_override(override)
    except HydraException as error:
        key, _, value = override.partition("=")
        if value.startswith(("[", "{", "'", '"')) or "'" in value or "\\" in value:
            shown = redact_overrides(f"override {override!r} cannot be read: {str(error).splitlines()[0]}", [override])
            raise UserError(f"{shown}; balance its brackets and quotes") from None
        return f"{key}='{value}'"
    if parsed.is_sweep_override():
        shown = redact_overrides(f"override {override!r} has several values", [override])
        raise UserError(f"{shown}; write a list as [a,b], text with a comma in quotes, or use `thresher sweep`")
    return override
