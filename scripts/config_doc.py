"""Pages made from the code that they describe: docs/reference/config.md and docs/reference/import-keys/.

Keys, types and defaults come from the schema, meanings from the docstrings of the fields. A key without a docstring is
an error. The keys of other trainers come from the tables that translate them. Run scripts/make-config-doc.

The Markdown here is what a code host shows. docs/extensions/config_reference.py makes the site's definition list from
the same chapters.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thresher.config import DPOConfig
from thresher.config.section import Section, holds_sections_by_name, inner_section
from thresher.config.strategies import find_strategy
from thresher.importers import huggingface, roll
from thresher.importers.convert import DIALECTS
from thresher.importers.translation import Dialect, Rule

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "config.md"
IMPORT_PAGES = PAGE.parent / "import-keys"
BEGIN = "<!-- begin: written by scripts/make-config-doc -->"
END = "<!-- end: written by scripts/make-config-doc -->"

# what a chapter is made of: a class, its sections by prefix, and the names of its keys
_Found = tuple[type[Section], dict[str, Section], list[str]]

# the order of the page; classes with the same title are one chapter, and so are the keys that a class inherits from
# another one of these
TITLES = {
    "DPOConfig": "Run",
    "LossConfig": "Objective",
    "ModelArgs": "Policy model",
    "QuantizationArgs": "Quantization",
    "TrainingArgs": "Training",
    "DataArgs": "Data",
    "TrainingDataArgs": "Mixture",
    "SetArgs": "One of several data sets",
    "SourceArgs": "Source of a mixture",
    "RoleConfig": "Workers",
    "PolicyConfig": "Policy",
    "ReferenceConfig": "Reference",
    "ReferenceModelArgs": "Reference model",
    "ValidationConfig": "Validation",
    "SamplesConfig": "Samples",
    "TrackerArgs": "Trackers",
    "ProfileConfig": "Profile",
    "StrategyArgs": "Engine",
    "FSDP2Settings": "fsdp2",
    "DeepSpeedTrainSettings": "DeepSpeed",
    "DeepSpeedInferSettings": "DeepSpeed",
    "MegatronSettings": "Megatron-Core",
}
ENGINES = ("fsdp2", "deepspeed", "megatron")
_ANY = "any value"
_OURS, _THEIRS = "the same in thresher", "[transformers'](transformers.md)"
_BOUNDS = (("exclusiveMinimum", ">"), ("minimum", ">="), ("exclusiveMaximum", "<"), ("maximum", "<="))


@dataclass(frozen=True)
class Key:
    """A config key: its name, its anchors on the page, and Markdown for the rest."""

    name: str
    anchors: tuple[str, ...]
    type: str
    default: str
    meaning: str

    @property
    def facts(self) -> str:
        return f"{self.type}, default {self.default}" if self.default != "none" else self.type


@dataclass(frozen=True)
class Chapter:
    """Keys below one heading, and the prefixes under which a config has them."""

    title: str
    prefixes: tuple[str, ...]
    keys: tuple[Key, ...]

    @property
    def place(self) -> str:
        if not any(self.prefixes):
            return "At the top of the config."
        return f"Below {' and '.join(f'`{prefix}`' for prefix in self.prefixes)}."


def find_sections(section: Section, prefix: str = "") -> Iterator[tuple[str, Section]]:
    """Yield every section at its defaults, with the prefix of its keys."""
    yield prefix, section
    for name in type(section).model_fields:
        if name == "strategy_config":  # a plain mapping, so that every engine can have keys of its own
            role = "infer" if prefix.startswith("reference") else "train"
            yield from ((f"{prefix}{name}.", find_strategy(f"{engine}_{role}").settings()) for engine in ENGINES)
        elif (inner := inner_section(type(section), name)) is not None:
            named = holds_sections_by_name(type(section), name)
            below = inner.model_construct() if named else getattr(section, name) or inner()
            yield from find_sections(below, f"{prefix}{name}.NAME." if named else f"{prefix}{name}.")


def find_places() -> dict[type[Section], dict[str, Section]]:
    """Return the sections of each class by the prefix of their keys."""
    places: dict[type[Section], dict[str, Section]] = {}
    for prefix, section in find_sections(DPOConfig()):
        places.setdefault(type(section), {})[prefix] = section
    return places


def chapters() -> list[Chapter]:
    """Return all keys by chapter, in the order of the page."""
    by_title: dict[str, _Found] = {}
    for cls, where in find_places().items():
        keys = [
            name for name in cls.model_fields if inner_section(cls, name) is None or holds_sections_by_name(cls, name)
        ]
        bases = [each for each in cls.__mro__[1:] if issubclass(each, Section) and each.__name__ in TITLES]
        inherited = [key for key in keys if any(key in base.model_fields for base in bases)]
        for base in bases:
            _add(by_title, TITLES[base.__name__], cls, where, inherited)
        _add(by_title, TITLES[cls.__name__], cls, where, [key for key in keys if key not in inherited])
    taken: set[str] = set()
    order = [title for title in dict.fromkeys(TITLES.values()) if title in by_title]
    return [_chapter(title, *by_title[title], taken) for title in order]


def _add(
    by_title: dict[str, _Found], title: str, cls: type[Section], where: dict[str, Section], keys: list[str]
) -> None:
    if not keys:
        return
    if title not in by_title:
        by_title[title] = (cls, dict(where), keys)
        return
    # classes that share a chapter have the same keys, or a reader would miss some
    first, both, first_keys = by_title[title]
    described, others = first.model_json_schema()["properties"], cls.model_json_schema()["properties"]
    if first_keys != keys or any(_facts(described[key]) != _facts(others[key]) for key in keys):
        raise ValueError(f"{first.__name__} and {cls.__name__} differ; give them different titles")
    both.update(where)


def _facts(schema: dict[str, Any]) -> tuple[str, str | None]:
    return _type(schema), schema.get("description")


def _chapter(title: str, cls: type[Section], where: dict[str, Section], keys: list[str], taken: set[str]) -> Chapter:
    schema = cls.model_json_schema()["properties"]
    found = []
    for name in keys:
        paths = [f"{prefix}{name}" for prefix in where]
        # engines share the section strategy_config, so a key of two engines has the engine's name in its anchor
        anchors = [path for path in paths if path not in taken]
        if any("strategy_config." in prefix for prefix in where):
            anchors.append(f"{title.lower().partition('-')[0]}.{name}")
        taken.update(anchors)
        text = _meaning(name, schema[name])
        found.append(Key(name, tuple(anchors), _type(schema[name]), _default(name, where), text))
    return Chapter(title, tuple(prefix.rstrip(".") for prefix in where), tuple(found))


def render() -> str:
    """Return all chapters as Markdown lists, with an anchor per key; the site has one for each of its places."""
    lines = []
    for chapter in chapters():
        lines += [f"## {chapter.title}", "", chapter.place, ""]
        for key in chapter.keys:
            lines += [f'- <a id="{key.anchors[0]}"></a>**`{key.name}`** ({key.facts})<br>', f"  {key.meaning}"]
        lines.append("")
    return "\n".join(lines)


def _meaning(key: str, schema: dict[str, Any]) -> str:
    if "description" not in schema:
        raise ValueError(f"config key {key} has no docstring; write one below its field")
    return " ".join(schema["description"].split())


def _default(key: str, where: dict[str, Section]) -> str:
    values = {prefix: _spell(getattr(section, key)) for prefix, section in where.items()}
    if len(set(values.values())) == 1:
        return next(iter(values.values()))
    return ", ".join(f"{prefix.partition('.')[0]}: {value}" for prefix, value in values.items())


def _spell(value: Any) -> str:
    return "none" if value is None else f"`{value if isinstance(value, str) else json.dumps(value)}`"


def _type(schema: dict[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(_type(part) for part in schema["anyOf"] if part.get("type") != "null")
    if "const" in schema:
        return _spell(schema["const"])
    if "enum" in schema:
        return ", ".join(f"`{choice}`" for choice in schema["enum"])
    if "type" not in schema:
        return _ANY
    if "prefixItems" in schema:
        return f"list of {len(schema['prefixItems'])} {schema['prefixItems'][0]['type']}s"
    if schema["type"] == "array":
        return f"list of {schema['items'].get('type', 'mapping')}s"
    if schema["type"] == "object":
        inner = schema["additionalProperties"]
        value = _type(inner) if isinstance(inner, dict) else _ANY
        return "mapping" if value == _ANY else f"mapping to {value}"
    bounds = [f"{sign} {schema[word]}" for word, sign in _BOUNDS if word in schema]
    return " ".join([schema["type"], ", ".join(bounds)]).strip()


def render_imports() -> dict[str, str]:
    """Return a page per trainer by its file name, and one for the keys that several trainers have from transformers."""
    intro = "Keys of transformers' `TrainingArguments`, which TRL, LLaMA-Factory, ms-swift and axolotl share."
    shared = [*_heading("transformers", intro), *_import_lists(huggingface.TABLE, huggingface.NEUTRAL.split())]
    pages = {f"{dialect.name}.md": _import_page(dialect) for dialect in DIALECTS}
    return {**pages, "transformers.md": "\n".join(shared)}


def _import_page(dialect: Dialect) -> str:
    ours = roll.our_keys() if dialect.name == "roll" else {}
    shared = set(huggingface.NEUTRAL.split())
    if not shared <= {*dialect.neutral}:
        shared = set()
    own = {
        key: rule
        for key, rule in dialect.table.items()
        if not (shared and huggingface.TABLE.get(key) is rule) and ours.get(key) != rule
    }
    neutral = [key for key in dialect.neutral if key not in shared]
    intro = f"How `thresher import` handles {dialect.title}'s keys."
    if len(own) < len(dialect.table):
        intro += f" Keys not listed are {_OURS if ours else _THEIRS}."
    defaults = dialect.defaults({"processes": 1})
    spelled = ", ".join(f"`{key}: {json.dumps(value)}`" for key, value in defaults.items())
    lists = _import_lists(own, neutral)
    return "\n".join([*_heading(dialect.title, intro), *lists, "## Defaults", "", f"{spelled}.", ""])


def _heading(title: str, intro: str) -> list[str]:
    return [f"# {title}", "", "<!-- written by scripts/make-config-doc -->", "", intro, ""]


def _import_lists(table: Mapping[str, Rule], neutral: list[str]) -> list[str]:
    """Group the keys by what becomes of them; a key that another one's rule reads stands beside that one."""
    read_with = {key: leader for key, rule in table.items() if (leader := _leader(key, rule, table))}
    same: dict[str, list[str]] = {}
    renamed: dict[str, list[str]] = {}
    lost: dict[str, list[str]] = {}
    dropped: dict[str, list[str]] = {}
    for key, rule in table.items():
        if key in read_with:
            continue
        followers = [other for other, leader in read_with.items() if leader == key]
        spelled = f"{_code([key])} (with {_code(followers)})" if followers else _code([key])
        read = [target for each in (key, *followers) for target in table[each].targets]
        targets = tuple(dict.fromkeys(read)) if rule.targets else ()
        section, _, leaf = targets[0].rpartition(".") if targets else ("", "", "")
        if len(targets) == 1 and not rule.note and leaf == key.rpartition(".")[2]:
            same.setdefault(_place(key, targets[0], section), []).append(spelled)
        elif targets or rule.function is not None:
            renamed.setdefault(_here(rule, targets), []).append(spelled)
        else:
            (lost if rule.changes_numbers else dropped).setdefault(rule.note, []).append(spelled)
    rows = [_row(", ".join(keys), here) for here, keys in renamed.items()]
    parts = {
        "Same name": [f"- {place}: {', '.join(keys)}" for place, keys in same.items()],
        "Other names": ["| key | here |", "|---|---|", *rows] if rows else [],
        "Stops the import": [f"- {', '.join(keys)}: {reason}" for reason, keys in lost.items()],
        "Not applied": [f"- {', '.join(keys)}: {reason}" for reason, keys in dropped.items()],
        "Changes nothing here": [f"{_code(neutral)}."],
    }
    return [line for title, lines in parts.items() if lines for line in (f"## {title}", "", *lines, "")]


def _leader(key: str, rule: Rule, table: Mapping[str, Rule]) -> str | None:
    """Return the key whose rule reads this one, if it is on the same page."""
    found = re.fullmatch(r"read with `(.+)`", rule.note)
    names = (found[1], f"{key.rpartition('.')[0]}.{found[1]}") if found else ()
    return next((name for name in names if name in table), None)


def _place(key: str, target: str, section: str) -> str:
    if "." in key and key == target:
        return "the same place"
    return f"`{section}`" if section else "top level"


def _here(rule: Rule, targets: tuple[str, ...]) -> str:
    """Our keys, and the note; a word for a rule that does not simply set them."""
    keys = f"{_code(targets)}{', with a different meaning' if rule.differs else ''}" if targets else "checked"
    return f"{keys}: {rule.note}" if rule.note else keys


def _code(keys: Iterable[str]) -> str:
    return ", ".join(f"`{key}`" for key in keys)


def _row(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def with_tables(page: str, tables: str) -> str:
    """Return the page with the tables between its markers."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the page must contain the lines {BEGIN!r} and {END!r}")
    return f"{before}{begin}\n\n{tables}\n{end}{after}"


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8"), render()), encoding="utf-8")
    for name, text in render_imports().items():
        (IMPORT_PAGES / name).write_text(text, encoding="utf-8")
