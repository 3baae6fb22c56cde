"""The base of every config section: frozen; an unknown key is an error that names the nearest known one."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any

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


def readable_errors(error: ValidationError, root: type[Section]) -> UserError:
    """Turn pydantic's report into one message: a line a problem, each with what to write instead."""
    lines = []
    for problem in error.errors():
        path = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "extra_forbidden":
            lines.append(f"{path}: unknown key; {_suggest(path, root)}")
        else:
            message = problem["msg"].removeprefix("Value error, ")
            lines.append(f"{path or 'config'}: {message} (got {problem['input']!r})")
    return UserError("the configuration has mistakes:\n" + "\n".join(f"  - {line}" for line in lines))


def _suggest(path: str, root: type[Section]) -> str:
    parent, _, key = path.rpartition(".")
    known = dict(known_keys(root))
    siblings = [name.rpartition(".")[2] for name in known if name.rpartition(".")[0] == parent]
    if near := difflib.get_close_matches(key, siblings, n=1, cutoff=0.6):
        return f"did you mean `{near[0]}`?"
    elsewhere = [name for name in known if name.rpartition(".")[2] == key]
    if elsewhere:
        return f"it belongs at `{elsewhere[0]}`"
    all_leaves = {name.rpartition(".")[2]: name for name in known}
    if near := difflib.get_close_matches(key, all_leaves, n=1, cutoff=0.75):
        return f"did you mean `{all_leaves[near[0]]}`?"
    return f"known keys here: {', '.join(sorted(siblings))}"


def known_keys(section: type[Section], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every dotted key of a section with its field."""
    for name, field in section.model_fields.items():
        dotted = f"{prefix}{name}"
        yield dotted, field
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, Section):
            yield from known_keys(inner, f"{dotted}.")
