"""Base of every config section: frozen; an unknown key is an error that names the nearest known key."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, model_validator
from pydantic.fields import FieldInfo

from thresher.errors import UserError, nearest
from thresher.foreign_names import foreign
from thresher.redact import redact


def also(spellings: Mapping[Any, Any]) -> BeforeValidator:
    """Accept other spellings of a value."""

    def spell(value: Any) -> Any:
        # compared, not looked up: a value of a wrong type may not be hashable. And with its type: 0 is not false
        found = (ours for other, ours in spellings.items() if type(value) is type(other) and value == other)
        return next(found, value)

    return BeforeValidator(spell)


# a string is one name, never a sequence of characters
StringList = Annotated[list[str], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)]


class Section(BaseModel):
    """One block of the YAML. Derived values are properties; nothing here probes hardware or environment."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", protected_namespaces=(), use_attribute_docstrings=True, allow_inf_nan=False
    )

    @model_validator(mode="before")
    @classmethod
    def _leave_out_empty_sections(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        # `strategy_config: ~`, or a section whose keys are all commented out
        mappings = {name for name, field in cls.model_fields.items() if get_origin(field.annotation) is dict}
        may_be_empty = {key for key in values if key in mappings or inner_section(cls, key) is not None}
        return {key: value for key, value in values.items() if value is not None or key not in may_be_empty}

    def non_default(self, *names: str) -> list[str]:
        """Return the settings among `names` whose value is not the default."""
        return [name for name in names if getattr(self, name) != type(self).model_fields[name].default]


def no_effect(names: Sequence[str], why: str) -> str:
    """Say that settings would be ignored; `{it}` in `why` stands for them."""
    verb, them = ("have", "them") if len(names) > 1 else ("has", "it")
    return f"{', '.join(names)} {verb} no effect {why.format(it=them)}"


def readable_errors(error: ValidationError, root: type[Section]) -> UserError:
    """Turn pydantic's report into one message with one line per problem, each with a fix."""
    known = [key for key, _ in known_keys(root)]
    lines: list[str] = []
    invalid: dict[str, list[str]] = {}
    got: dict[str, str] = {}
    for problem in error.errors():
        path = ".".join(str(part) for part in problem["loc"])
        known += _keys_of_named(root, [str(part) for part in problem["loc"]])
        if problem["type"] == "extra_forbidden":
            lines.append(f"{path}: unknown key; {_suggest(path, known)}")
            continue
        # a union reports one problem per member, at a path that continues below the key with the member's type
        parts = path.split(".")
        prefixes = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
        key = next((prefix for prefix in prefixes if prefix in known), path)
        is_section = problem["type"] == "model_type"  # pydantic would name our class
        text = f"a section with keys below it, not a value; ~{key} leaves it out" if is_section else problem["msg"]
        invalid.setdefault(key, []).append(text.removeprefix("Value error, "))
        got.setdefault(key, _shown(problem["loc"], problem["input"]))
    for key, messages in invalid.items():
        # a problem of the whole config has one line per setting
        lines += [f"{key}: {', or '.join(messages)}{got[key]}"] if key else messages[0].splitlines()
    return invalid_config(lines)


def invalid_config(problems: Iterable[str]) -> UserError:
    """Make one message of all problems."""
    return UserError("invalid configuration:\n" + "\n".join(f"  - {problem}" for problem in problems))


def _shown(path: tuple[int | str, ...], value: Any) -> str:
    """Show a value with its secrets masked, which the keys on its path may tell."""
    if isinstance(value, dict):  # a whole section would bury the message
        return ""
    try:
        for key in reversed(path):
            value = redact({str(key): value})[str(key)]
        text = repr(value)
    except (ValueError, RecursionError):  # integers with thousands of digits, lists that contain themselves
        text = f"a {type(value).__name__} that is too large to show"
    return f" (got {text if len(text) <= 100 else text[:97] + '...'})"


_REMOVED = {"spare_workers": "spare workers no longer exist: remove it, a restart starts new processes"}


def _suggest(path: str, known: Sequence[str]) -> str:
    """Return a hint for an unknown key: by its meaning here or in other trainers, then by its spelling."""
    if path in _REMOVED:
        return _REMOVED[path]
    parent, _, key = path.rpartition(".")
    siblings = [_leaf(name) for name in known if name.rpartition(".")[0] == parent]
    elsewhere = [name for name in known if _leaf(name) == key]
    if elsewhere:
        inside = [name for name in elsewhere if name.startswith(f"{parent}.")]
        return f"it belongs at `{(inside or elsewhere)[0]}`"
    if explained := foreign().hint(path):
        return explained
    if meant := nearest(key, siblings):
        return f"did you mean `{meant}`?"
    all_leaves = foreign().names_of_other_trainers() | {_leaf(name): name for name in known}
    if meant := nearest(key, all_leaves):
        return f"did you mean `{all_leaves[meant]}`?"
    return f"known keys here: {', '.join(sorted(siblings))}" if siblings else "it is not a key here; remove it"


def _leaf(path: str) -> str:
    return path.rpartition(".")[2]


def known_keys(section: type[Section], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield every dotted key of a section with its field; those of sections by name have none."""
    for name, field in section.model_fields.items():
        yield f"{prefix}{name}", field
        if (inner := inner_section(section, name)) is not None and not holds_sections_by_name(section, name):
            yield from known_keys(inner, f"{prefix}{name}.")


def holds_sections_by_name(section: type[Section], name: str) -> bool:
    """Whether a key is a mapping of names to sections."""
    return get_origin(section.model_fields[name].annotation) is dict and inner_section(section, name) is not None


def _keys_of_named(section: type[Section] | None, path: Sequence[str]) -> list[str]:
    """Return the keys of the section with a name on a path, such as sources.NAME; none if there is no name on it."""
    for at, part in enumerate(path[:-1]):
        inner = None if section is None else inner_section(section, part)
        if inner is not None and section is not None and holds_sections_by_name(section, part):
            return [".".join([*path[: at + 2], name]) for name in inner.model_fields]
        section = inner
    return []


def inner_section(section: type[Section], name: str) -> type[Section] | None:
    """Return the section that a key holds, optional or not; None for a plain value or an unknown key."""
    field = section.model_fields.get(name)
    # of a list of sections, each is a value
    for each in (
        () if field is None or get_origin(field.annotation) is list else (field.annotation, *get_args(field.annotation))
    ):
        if isinstance(each, type) and issubclass(each, Section):
            return each
    return None


def section_at(section: type[Section] | None, key: str) -> type[Section] | None:
    """Return the section at a dotted key; None if it holds a value."""
    for part in key.split("."):
        section = None if section is None else inner_section(section, part)
    return section


def merge_settings(
    values: Mapping[str, Any], added: Mapping[str, Any], root: type[Section], prefix: str = ""
) -> dict[str, Any]:
    """Add nested values; a key that is set already must have the same value."""
    merged = dict(values)
    for name, value in added.items():
        present = merged.get(name)
        # strategy_config is a plain mapping, because its keys depend on the engine
        is_section = name == "strategy_config" or section_at(root, f"{prefix}{name}") is not None
        if isinstance(present, Section):
            present = present.model_dump(exclude_unset=True)
        if present is None:
            merged[name] = value
        elif isinstance(value, dict) and is_section:
            if isinstance(present, dict):  # else validation reports the wrong type
                merged[name] = merge_settings(present, value, root, f"{prefix}{name}.")
        elif present != value:
            raise UserError(f"{prefix}{name} is set twice, to {present!r} and to {value!r}; keep one")
    return merged
