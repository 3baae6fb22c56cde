"""Read the command line of a training script: its options, its environment and the processes that it starts.

Only what training scripts use is understood: assignments, arrays, continuation lines and comments. No code is run:
command substitutions and unassigned variables are empty.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_ASSIGNMENT = re.compile(r"(?:export\s+|declare\s+(?:-\w+\s+)?|local\s+)?([A-Za-z_]\w*)=(.*)", re.DOTALL)
_ARRAY = re.compile(r"^[ \t]*(?:declare\s+-a\s+)?([A-Za-z_]\w*)=\(([^()]*)\)", re.MULTILINE)
_SUBSTITUTION = re.compile(r"\$\([^()]*\)|`[^`]*`")
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?:\[[@*]\])?(?::-([^}]*))?\}|(\w+)|[@*#?])")
_WHOLE = re.compile(r"\$(?:\{\w+(?:\[[@*]\])?(?::-[^}]*)?\}|\w+|[@*])")
_REDIRECTION = re.compile(r"\s\d?>{1,2}\s*&?\s*\S+")
_OPERATOR = re.compile(r"[();<>|&]+")
_PROCESSES = ("nproc_per_node", "nproc-per-node", "num_processes", "num-processes", "num_gpus")


@dataclass
class Command:
    """One command: environment before it, and its words."""

    environment: dict[str, str]
    words: list[str]


@dataclass
class Arguments:
    """Options of a training program. empty: options whose value is an empty variable. files: other words."""

    options: dict[str, Any] = field(default_factory=dict)
    empty: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    overrides: list[str] = field(default_factory=list)


def read_commands(text: str) -> list[Command]:
    """List the commands of a script, with variables replaced by the values that the script assigns."""
    text = text.replace("\r\n", "\n").replace("\\\n", " ")
    text = _SUBSTITUTION.sub("", _SUBSTITUTION.sub("", text))
    variables: dict[str, list[str]] = {}
    for name, body in _ARRAY.findall(text):
        variables[name] = _words(body)
    commands = []
    for line in _ARRAY.sub("", text).splitlines():
        for words in _split_commands(_words(_REDIRECTION.sub(" ", line))):
            environment: dict[str, str] = {}
            while words and (match := _ASSIGNMENT.fullmatch(words[0])):
                environment[match[1]] = _expand(match[2], variables)
                words = words[1:]
            if words[:1] in (["export"], ["declare"], ["local"]):
                environment |= {m[1]: m[2] for word in words[1:] if (m := _ASSIGNMENT.fullmatch(word))}
                words = []
            if words:
                commands.append(Command({**_flat(variables), **environment}, list(_expand_words(words, variables))))
            else:
                variables |= {name: [value] for name, value in environment.items()}
    return commands


def _words(text: str) -> list[str]:
    lexer = shlex.shlex(text, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    try:
        return list(lexer)
    except ValueError:  # an open quote: a line of a here-document or of a program for another shell tool
        return []


def _split_commands(words: Sequence[str]) -> Iterable[list[str]]:
    command: list[str] = []
    for word in words:
        if _OPERATOR.fullmatch(word):
            if command:
                yield command
            command = []
        else:
            command.append(word)
    if command:
        yield command


def _flat(variables: Mapping[str, list[str]]) -> dict[str, str]:
    return {name: " ".join(values) for name, values in variables.items()}


def _expand(text: str, variables: Mapping[str, list[str]]) -> str:
    def value(match: re.Match[str]) -> str:
        found = " ".join(variables.get(match[1] or match[3] or "", []))
        return found or match[2] or ""

    return _VARIABLE.sub(value, text).strip("-_") if "$" in text else text


def _expand_words(words: Iterable[str], variables: Mapping[str, list[str]]) -> Iterable[str]:
    for word in words:
        if not _WHOLE.fullmatch(word):
            yield _expand(word, variables)
            continue
        match = _VARIABLE.fullmatch(word)
        name = (match[1] or match[3] or "") if match else ""
        values = variables.get(name) or ([match[2]] if match and match[2] else [""])
        for value in values:
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
    here = next((launcher[name.replace("-", "_")] for name in _PROCESSES if name.replace("-", "_") in launcher), None)
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
