"""The base of every config section: frozen; an unknown key is an error that names the nearest known one."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from thresher.errors import UserError


class Section(BaseModel):
    """One block of the YAML. Derived values are properties; nothing here probes hardware or environment."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        protected_namespaces=(),
        use_attribute_docstrings=True,
        allow_inf_nan=False,
    )

    def turned(self, *names: str) -> list[str]:
        """Name those of these settings that are not at their default."""
        return [name for name in names if getattr(self, name) != type(self).model_fields[name].default]


def readable_errors(error: ValidationError, root: type[Section]) -> UserError:
    """Turn pydantic's report into one message: a line a problem, each with what to write instead."""
    known = dict(known_keys(root))
    unknown: list[str] = []
    wrong: dict[str, list[str]] = {}
    got: dict[str, Any] = {}
    for problem in error.errors():
        path = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "extra_forbidden":
            unknown.append(f"{path}: unknown key; {_suggest(path, known)}")
            continue
        # a value of several allowed types fails once for each; below the key stands only which type was tried
        key = next((key for key in _prefixes(problem["loc"]) if key in known), path)
        wrong.setdefault(key, []).append(problem["msg"].removeprefix("Value error, "))
        got.setdefault(key, problem["input"])
    lines = [
        *unknown,
        *(f"{key or 'config'}: {', or '.join(messages)}{_shown(got[key])}" for key, messages in wrong.items()),
    ]
    return UserError("the configuration has mistakes:\n" + "\n".join(f"  - {line}" for line in lines))


def _prefixes(parts: tuple[int | str, ...]) -> Iterator[str]:
    for length in range(len(parts), 0, -1):
        yield ".".join(str(part) for part in parts[:length])


def _shown(value: object) -> str:
    # a section is no value that anybody typed on one line
    if isinstance(value, dict):
        return ""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # integers of many thousand digits, lists without an end
        text = f"a {type(value).__name__} that is too large to show"
    return f" (got {text if len(text) <= 100 else text[:97] + '...'})"


def _suggest(path: str, known: dict[str, Any]) -> str:
    parent, _, key = path.rpartition(".")
    siblings = [name.rpartition(".")[2] for name in known if name.rpartition(".")[0] == parent]
    elsewhere = [name for name in known if name.rpartition(".")[2] == key]
    if elsewhere:
        inside = [name for name in elsewhere if name.startswith(f"{parent}.")]
        return f"it belongs at `{(inside or elsewhere)[0]}`"
    if near := difflib.get_close_matches(key, siblings, n=1, cutoff=0.6):
        return f"did you mean `{near[0]}`?"
    all_leaves = {name.rpartition(".")[2]: name for name in known}
    if near := difflib.get_close_matches(key, all_leaves, n=1, cutoff=0.75):
        return f"did you mean `{all_leaves[near[0]]}`?"
    return f"known keys here: {', '.join(sorted(siblings))}"


def known_keys(section: type[Section], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every dotted key of a section with its field."""
    for name, field in section.model_fields.items():
        dotted = f"{prefix}{name}"
        yield dotted, field
        for inner in (field.annotation, *get_args(field.annotation)):
            if isinstance(inner, type) and issubclass(inner, Section):
                yield from known_keys(inner, f"{dotted}.")
