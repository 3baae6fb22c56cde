"""The tables of docs/reference/config.md and the pages of docs/reference/import-keys, made from the code they describe.

Keys, types and defaults come from the schema, meanings from the docstrings of the fields. A key without a docstring is
an error. The keys of other trainers come from the tables that translate them. Run scripts/make-config-doc.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from thresher.config import DPOConfig, LossConfig
from thresher.config.section import Section, inner_section
from thresher.config.strategies import find_strategy
from thresher.importers import huggingface, roll
from thresher.importers.convert import DIALECTS
from thresher.importers.translation import Dialect, Rule

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "config.md"
IMPORT_PAGES = PAGE.with_name("import-keys")
BEGIN = "<!-- begin: written by scripts/make-config-doc -->"
END = "<!-- end: written by scripts/make-config-doc -->"

TITLES = {
    "DPOConfig": "Run",
    "LossConfig": "Objective",
    "TrackerArgs": "Trackers",
    "FSDP2Settings": "`strategy_config` of fsdp2",
    "DeepSpeedTrainSettings": "`strategy_config` of deepspeed_train",
    "DeepSpeedInferSettings": "`strategy_config` of deepspeed_infer",
    "MegatronSettings": "`strategy_config` of megatron",
}
ENGINES = ("fsdp2", "deepspeed", "megatron")
_BOUNDS = (("exclusiveMinimum", ">"), ("minimum", ">="), ("exclusiveMaximum", "<"), ("maximum", "<="))


def find_sections(section: Section, prefix: str = "") -> Iterator[tuple[str, Section]]:
    """Yield every section at its defaults, with the prefix of its keys."""
    yield prefix, section
    for name in type(section).model_fields:
        if name == "strategy_config":  # a plain mapping, so that every engine can have keys of its own
            role = "infer" if prefix.startswith("reference") else "train"
            yield from ((f"{prefix}{name}.", find_strategy(f"{engine}_{role}").settings()) for engine in ENGINES)
        elif (inner := inner_section(type(section), name)) is not None:
            yield from find_sections(getattr(section, name) or inner(), f"{prefix}{name}.")


def render() -> str:
    """Return all tables: one per section, which may occur under several prefixes."""
    places = find_places()
    tables = []
    for cls, where in places.items():
        objective = set(LossConfig.model_fields) if cls is DPOConfig else set()
        keys = [name for name in cls.model_fields if inner_section(cls, name) is None]
        own = [key for key in keys if key not in objective]
        if own:
            tables.append(_table(cls, where, own, TITLES.get(cls.__name__)))
        if objective:
            tables.append(_table(cls, where, [key for key in keys if key in objective], TITLES["LossConfig"]))
    return "\n".join(tables)


def find_places() -> dict[type[Section], dict[str, Section]]:
    """Return the sections of each class by the prefix of their keys."""
    places: dict[type[Section], dict[str, Section]] = {}
    for prefix, section in find_sections(DPOConfig()):
        places.setdefault(type(section), {})[prefix] = section
    return places


def _table(cls: type[Section], where: dict[str, Section], keys: list[str], title: str | None) -> str:
    names = ", ".join(f"`{prefix.rstrip('.')}`" for prefix in where if prefix)
    heading = " ".join(part for part in (title, f"({names})" if title and names else names) if part)
    schema = cls.model_json_schema()["properties"]
    lines = [f"## {heading}", "", "| key | type | default | meaning |", "|---|---|---|---|"]
    for key in keys:
        cells = (f"`{key}`", _type(schema[key]), _default(key, where), _meaning(key, schema[key]))
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join([*lines, ""])


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
        return "any value"
    if schema["type"] == "array":
        return f"list of {schema['items']['type']}s"
    if schema["type"] == "object":
        inner = schema["additionalProperties"]
        return f"mapping to {_type(inner)}" if isinstance(inner, dict) else "mapping"
    bounds = [f"{sign} {schema[word]}" for word, sign in _BOUNDS if word in schema]
    return " ".join([schema["type"], ", ".join(bounds)]).strip()


def render_imports() -> dict[str, str]:
    """Return a page per trainer by its file name, and one for the keys that several trainers have from transformers."""
    shared = [
        *_heading(
            "transformers",
            "Keys of transformers' `TrainingArguments`, which TRL, LLaMA-Factory, ms-swift and axolotl share.",
        ),
        *_import_table(huggingface.TABLE),
        "",
        _neutral(huggingface.NEUTRAL.split()),
        "",
    ]
    pages = {f"{dialect.name}.md": _import_page(dialect) for dialect in DIALECTS}
    return {**pages, "transformers.md": "\n".join(shared)}


def _import_page(dialect: Dialect) -> str:
    shared, ours = set(huggingface.NEUTRAL.split()), {} if dialect.name != "roll" else roll.our_keys()
    own = {
        key: rule
        for key, rule in dialect.table.items()
        if huggingface.TABLE.get(key) is not rule and ours.get(key) != rule
    }
    neutral = [key for key in dialect.neutral if key not in shared or not shared <= {*dialect.neutral}]
    intro = f"How `thresher import` handles each key of {dialect.title}. [What the words mean](index.md)."
    lines = [*_heading(dialect.title, intro), *_import_table(own), "", _neutral(neutral), ""]
    if len(own) < len(dialect.table):
        lines += [
            "All other keys are thresher's own." if ours else "Its other keys are [transformers'](transformers.md).",
            "",
        ]
    defaults = dialect.defaults({"processes": 1})
    spelled = ", ".join(f"`{key}: {json.dumps(value)}`" for key, value in defaults.items())
    return "\n".join([*lines, f"Defaults that are written out: {spelled}.", ""])


def _heading(title: str, intro: str) -> list[str]:
    return [f"# {title}", "", "<!-- written by scripts/make-config-doc -->", "", intro, ""]


def _neutral(keys: list[str]) -> str:
    return f"Changes nothing here: {', '.join(f'`{key}`' for key in keys)}."


def _import_table(table: dict[str, Rule]) -> list[str]:
    """Two columns, which fit a phone: the notes are long."""
    lines = ["| key | here |", "|---|---|"]
    for rule, keys in _group(table):
        targets = ", ".join(f"`{key}`" for key in rule.targets)
        cells = (", ".join(f"`{key}`" for key in keys), ". ".join(part for part in (targets, _fate(rule)) if part))
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return lines


def _group(table: dict[str, Rule]) -> list[tuple[Rule, list[str]]]:
    """Return each rule with its keys; keys that share a rule are one group."""
    groups: list[tuple[Rule, list[str]]] = []
    for key, rule in table.items():
        found = next((keys for other, keys in groups if rule == other), None)
        if found is None:
            groups.append((rule, [key]))
        else:
            found.append(key)
    return groups


def _fate(rule: Rule) -> str:
    if rule.differs:
        fate = "Different meaning"
    elif rule.targets:
        fate = "" if rule.function is None else "Translated"
    elif rule.function is not None:
        fate = "Checked"
    else:
        fate = "**No equivalent**" if rule.changes_numbers else "No equivalent"
    return ": ".join(part for part in (fate, rule.note) if part)


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
