"""Read a config of another trainer: YAML, JSON or a shell script; and find out whose it is."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from thresher.config.dialects.axolotl import AXOLOTL
from thresher.config.dialects.colossalchat import COLOSSALCHAT
from thresher.config.dialects.llama_factory import LLAMA_FACTORY
from thresher.config.dialects.ms_swift import MS_SWIFT
from thresher.config.dialects.nemo_rl import NEMO_RL
from thresher.config.dialects.open_instruct import OPEN_INSTRUCT
from thresher.config.dialects.roll import ROLL
from thresher.config.dialects.shell import Arguments, count_processes, find_program, read_commands, read_options
from thresher.config.dialects.translation import Dialect
from thresher.config.dialects.trl import TRL
from thresher.errors import UserError

# in the order in which they are tried: the keys of TRL are a part of the others' keys
DIALECTS = (ROLL, NEMO_RL, AXOLOTL, LLAMA_FACTORY, MS_SWIFT, COLOSSALCHAT, OPEN_INSTRUCT, TRL)
NAMES = {dialect.name: dialect for dialect in DIALECTS} | {"handbook": TRL, "alignment-handbook": TRL}
_CONFIG_OPTION = {TRL.name: "config", NEMO_RL.name: "config", ROLL.name: "config_name"}
_YAML = (".yaml", ".yml")


@dataclass
class ForeignConfig:
    """A config of another trainer. empty: options of a script whose value is an empty variable."""

    dialect: Dialect | None
    values: dict[str, Any]
    num_devices: int = 1
    empty: list[str] = field(default_factory=list)


def read_foreign(path: Path, dialect: Dialect | None = None) -> ForeignConfig:
    """Read a config, and recognize its dialect unless it is given."""
    if not path.is_file():
        raise UserError(f"{path} does not exist; give the config file or the training script of another trainer")
    if path.suffix in (*_YAML, ".json"):
        values = _read_mapping(path)
        return ForeignConfig(dialect or recognize(values), values)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read as a training script: {error}") from None
    return _read_script(text, path, dialect)


def recognize(values: Mapping[str, Any]) -> Dialect | None:
    """Find the dialect of a config by its keys."""
    return next((d for d in DIALECTS for mark in d.marks if mark <= values.keys()), None)


def _read_script(text: str, path: Path, dialect: Dialect | None) -> ForeignConfig:
    candidates = DIALECTS if dialect is None else (dialect,)
    for command in read_commands(text):
        for candidate in candidates:
            program = find_program(command.words, candidate.programs)
            if program is not None:
                arguments = read_options(command.words[program.stop :])
                values = _merge_files(arguments, path, candidate)
                return ForeignConfig(candidate, values, count_processes(command, program), arguments.empty)
    programs = ", ".join(program for candidate in candidates for program in candidate.programs)
    raise UserError(f"{path} runs no training program that is known here; known: {programs}")


def _merge_files(arguments: Arguments, path: Path, dialect: Dialect) -> dict[str, Any]:
    """Read the config files that a command names; its options take precedence."""
    from omegaconf import OmegaConf

    options = dict(arguments.options)
    option = _CONFIG_OPTION.get(dialect.name)
    named = [str(options.pop(option))] if option in options else []
    directory = str(options.pop("config_path", ".")) if dialect is ROLL else "."
    values: dict[str, Any] = {}
    for name in [*named, *(file for file in arguments.files if file.endswith((*_YAML, ".json")))]:
        places = [place / directory / f"{name}{suffix}" for place in (Path(), path.parent) for suffix in ("", ".yaml")]
        found = next((place for place in places if place.is_file()), None)
        if found is None:
            raise UserError(f"{path} names the config {name}, which is not here; import that file instead")
        values = _read_mapping(found)
    if arguments.overrides and dialect in (NEMO_RL, ROLL):
        overrides = OmegaConf.from_dotlist([word.lstrip("+") for word in arguments.overrides])
        values = OmegaConf.to_container(OmegaConf.merge(values, overrides))  # type: ignore[assignment]
    return {**values, **options}


def _read_mapping(path: Path) -> dict[str, Any]:
    """Read YAML or JSON with its interpolations and NeMo-RL's `defaults`, which names a parent file."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    try:
        config: Any = OmegaConf.load(path)
        for _ in range(10):
            parent = config.get("defaults") if OmegaConf.is_dict(config) else None
            if not isinstance(parent, str) or not parent.endswith(_YAML):
                break
            path = path.parent / parent
            del config["defaults"]
            config = OmegaConf.merge(OmegaConf.load(path), config)
        values = OmegaConf.to_container(config, resolve=False)
    # AttributeError, KeyError, TypeError, AssertionError: OmegaConf does not check the nodes of odd YAML
    except (OSError, ValueError, YAMLError, OmegaConfBaseException, RecursionError, AttributeError, KeyError,
            TypeError, AssertionError) as error:  # fmt: skip
        raise UserError(f"{path} cannot be read: {str(error).strip()}") from None
    if not isinstance(values, dict):
        raise UserError(f"{path} holds a {type(values).__name__}; it must be a mapping of keys")
    return {str(key): value for key, value in _resolve(values, config, "").items()}


def _resolve(values: dict[Any, Any], config: Any, prefix: str) -> dict[Any, Any]:
    """Resolve interpolations one by one; one that needs a function of the trainer stays as it is written."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    resolved = {}
    for key, value in values.items():
        if isinstance(value, dict):
            value = _resolve(value, config, f"{prefix}{key}.")
        elif isinstance(value, str) and "${" in value and "${oc." not in value:
            with contextlib.suppress(OmegaConfBaseException, ValueError):
                value = OmegaConf.select(config, f"{prefix}{key}")
        resolved[key] = value
    return resolved
