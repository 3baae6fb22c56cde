"""Read a config of another trainer: YAML, JSON, or the command line of a shell script; and find out whose it is.

Of a script, only what training scripts use is understood: assignments, arrays, continuation lines and comments. No code
is run: command substitutions and unassigned variables are empty.
"""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from thresher.errors import UserError
from thresher.importers.translation import Dialect

_CONFIG_OPTIONS = {"trl": "config", "nemo-rl": "config", "roll": "config_name"}
_YAML = (".yaml", ".yml")
_ASSIGNMENT = re.compile(r"(?:export\s+|declare\s+(?:-\w+\s+)?|local\s+)?([A-Za-z_]\w*)=(.*)", re.DOTALL)
_ARRAY = re.compile(r"^[ \t]*(?:declare\s+-a\s+)?([A-Za-z_]\w*)=\(([^()]*)\)", re.MULTILINE)
_SUBSTITUTION = re.compile(r"\$\([^()]*\)|`[^`]*`")
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?:\[[@*]\])?(?::-([^}]*))?\}|(\w+)|[@*#?])")
_REDIRECTION = re.compile(r"\s\d?>{1,2}\s*&?\s*\S+")
_INSIDE_WORD = re.compile(r"(?<=[^\s;&|()])#")  # where it does not start a comment
_OPERATOR = re.compile(r"[();<>|&]+")


@dataclass
class ForeignConfig:
    """A config of another trainer."""

    dialect: Dialect | None
    values: dict[str, Any]
    num_devices: int = 1
    empty: list[str] = field(default_factory=list)  # options of a script whose value is an empty variable


def read_foreign(path: Path, dialects: Sequence[Dialect]) -> ForeignConfig:
    """Read a config, and recognize its dialect among these; the only one is taken as it is."""
    if not path.is_file():
        raise UserError(f"{path} does not exist; give the config file or the training script of another trainer")
    if path.suffix in (*_YAML, ".json"):
        values = _read_mapping(path)
        return ForeignConfig(recognize(values, dialects) if len(dialects) > 1 else dialects[0], values)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read as a training script: {error}") from None
    return _read_script(text, path, dialects)


def recognize(values: Mapping[str, Any], dialects: Sequence[Dialect]) -> Dialect | None:
    """Find the dialect of a config by its keys."""
    return next((each for each in dialects for mark in each.marks if mark <= values.keys()), None)


def _read_script(text: str, path: Path, dialects: Sequence[Dialect]) -> ForeignConfig:
    for command in read_commands(text):
        for candidate in dialects:
            program = find_program(command.words, candidate.programs)
            if program is not None:
                arguments = read_options(command.words[program.stop :])
                values = _merge_files(arguments, path, candidate)
                return ForeignConfig(candidate, values, count_processes(command, program), arguments.empty)
    programs = ", ".join(program for candidate in dialects for program in candidate.programs)
    raise UserError(f"{path} runs no training program that is known here; known: {programs}")


def _merge_files(arguments: Arguments, path: Path, dialect: Dialect) -> dict[str, Any]:
    """Read the config files that a command names; its options take precedence."""
    from omegaconf import OmegaConf

    options = dict(arguments.options)
    option = _CONFIG_OPTIONS.get(dialect.name)
    named = [str(options.pop(option))] if option in options else []
    directory = str(options.pop("config_path", ".")) if dialect.name == "roll" else "."
    values: dict[str, Any] = {}
    for name in [*named, *(file for file in arguments.files if file.endswith((*_YAML, ".json")))]:
        places = [place / directory / f"{name}{suffix}" for place in (Path(), path.parent) for suffix in ("", ".yaml")]
        found = next((place for place in places if place.is_file()), None)
        if found is None:
            raise UserError(f"{path} names the config {name}, which is not here; import that file instead")
        values = _read_mapping(found)
    if arguments.overrides and dialect.name in ("nemo-rl", "roll"):
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


@dataclass
class Command:
    """One command: environment before it, and its words."""

    environment: dict[str, str]
    words: list[str]


@dataclass
class Arguments:
    """Options of a training program, and its other words."""

    options: dict[str, Any] = field(default_factory=dict)
    empty: list[str] = field(default_factory=list)  # options whose value is an empty variable
    files: list[str] = field(default_factory=list)
    overrides: list[str] = field(default_factory=list)


def read_commands(text: str) -> list[Command]:
    """List the commands of a script, with variables replaced by the values that the script assigns."""
    text = text.replace("\r\n", "\n").replace("\\\n", " ")
    # an empty word: an option whose value a command computes is not a flag
    text = _SUBSTITUTION.sub('""', _SUBSTITUTION.sub('""', text))
    variables: dict[str, list[str]] = {}
    for name, body in _ARRAY.findall(text):
        variables[name] = _words(body)
    commands = []
    for line in _ARRAY.sub("", text).splitlines():
        for is_operator, group in groupby(
            _words(_REDIRECTION.sub(" ", line)), lambda word: bool(_OPERATOR.fullmatch(word))
        ):
            words = [] if is_operator else list(group)
            environment: dict[str, str] = {}
            while words and (match := _ASSIGNMENT.fullmatch(words[0])):
                environment[match[1]] = _expand(match[2], variables)
                words = words[1:]
            if words[:1] in (["export"], ["declare"], ["local"]):
                environment |= {m[1]: m[2] for word in words[1:] if (m := _ASSIGNMENT.fullmatch(word))}
                words = []
            if words:
                assigned = {name: " ".join(values) for name, values in variables.items()}
                commands.append(Command({**assigned, **environment}, list(_expand_words(words, variables))))
            else:
                variables |= {name: [value] for name, value in environment.items()}
    return commands


def _words(text: str) -> list[str]:
    lexer = shlex.shlex(_INSIDE_WORD.sub("\0", text), posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    try:
        return [word.replace("\0", "#") for word in lexer]
    except ValueError:  # an open quote: a line of a here-document or of a program for another shell tool
        return []


def _expand(text: str, variables: Mapping[str, list[str]]) -> str:
    def value(match: re.Match[str]) -> str:
        found = " ".join(variables.get(match[1] or match[3] or "", []))
        return found or match[2] or ""

    return _VARIABLE.sub(value, text).strip("-_") if "$" in text else text


def _expand_words(words: Iterable[str], variables: Mapping[str, list[str]]) -> Iterable[str]:
    for word in words:
        match = _VARIABLE.fullmatch(word)
        if match is None:
            yield _expand(word, variables)
            continue
        for value in variables.get(match[1] or match[3] or "") or [match[2]]:
            yield from shlex.split(_expand(value, variables)) if value else [""]


def find_program(words: Sequence[str], programs: Iterable[str]) -> slice | None:
    """Find the words of a training program."""
    for program in programs:
        pattern = program.split()
        for start in range(len(words) - len(pattern) + 1):
            found = words[start : start + len(pattern)]
            if all(word == part or word.endswith(f"/{part}") for word, part in zip(found, pattern, strict=True)):
                return slice(start, start + len(pattern))
    return None


def count_processes(command: Command, program: slice) -> int:
    """Return the number of training processes that the launcher before a program starts."""
    launcher = read_options(command.words[: program.start]).options
    nodes = launcher.get("nnodes") or launcher.get("num_machines") or command.environment.get("NNODES") or 1
    names = ("nproc_per_node", "num_processes", "num_gpus")
    here = next((launcher[name] for name in names if name in launcher), None)
    is_total = here is not None and "num_processes" in launcher  # accelerate counts all nodes
    here = here or command.environment.get("NPROC_PER_NODE") or 1
    return _count(here) * (1 if is_total else _count(nodes))


def _count(value: Any) -> int:
    return int(value) if str(value).isdigit() and int(value) > 0 else 1


def read_options(words: Sequence[str]) -> Arguments:
    """Read `--key value`, `--key=value`, `--flag`, and lists of values; scalars are read as YAML."""
    read = Arguments()
    key: str | None = None
    values: list[str] = []

    def finish() -> None:
        if key is None:
            read.files.extend(word for word in values if word and "=" not in word)
            read.overrides.extend(word for word in values if "=" in word)
        elif values and not any(values):
            read.empty.append(key)
        else:
            given = [_scalar(value) for value in values if value]
            read.options[key] = True if not given else given[0] if len(given) == 1 else given

    for word in words:
        if word.startswith("--") and len(word) > 2:
            finish()
            name, separator, value = word[2:].partition("=")
            key, values = name.replace("-", "_"), [value] if separator else []
        elif key is not None and "." in word and "=" in word and values:  # a Hydra override after an option
            read.overrides.append(word)
        else:
            values.append(word)
    finish()
    return read


def _scalar(text: str) -> Any:
    from omegaconf import OmegaConf

    if text in ("True", "False"):
        return text == "True"
    if "${" in text:
        return text
    try:
        return OmegaConf.to_container(OmegaConf.create({"value": OmegaConf.create(f"v: {text}").v}))["value"]  # type: ignore[index,call-overload]
    except Exception:  # a text that YAML reads otherwise, such as one with a colon
        return text
