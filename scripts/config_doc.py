"""The tables of docs/reference/config.md, made from the config's schema, so that the page cannot part from the code.

Keys, types and defaults come from the schema, meanings from the docstrings of the fields. `MEANINGS` holds those of the
fields that have none; a key without a meaning, or a meaning without a key, is an error. Run scripts/make-config-doc.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from thresher.config.dpo import DPOConfig, LossConfig
from thresher.config.section import Section

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "config.md"
BEGIN = "<!-- begin: written by scripts/make-config-doc -->"
END = "<!-- end: written by scripts/make-config-doc -->"

MEANINGS = {
    "beta": "Scale of the rewards: how hard the reference holds. The loss's own default when absent.",
    "label_smoothing": "Share of labels taken to be flipped. The loss's own default when absent.",
    "cpo_alpha": "Weight of the NLL term of cpo. The loss's own default when absent.",
    "discopop_tau": "Temperature of discopop's gate. The loss's own default when absent.",
    "f_divergence_type": "f-DPO: the divergence that ties the policy to the reference.",
    "f_alpha_divergence_coef": "Only with alpha_divergence: 0 gives forward KL, 1 reverse KL.",
    "exp_name": "Name of the run on trackers.",
    "seed": "Order of the pairs, first weights of adapters, every other random draw.",
    "max_steps": "Optimizer steps; -1 says the same as leaving it out.",
    "logging_steps": "Log every so many steps: means since the last log. The final step is always logged.",
    "metric_for_best": "The evaluated metric that names the best checkpoint.",
    "greater_is_better": "Whether a higher value of metric_for_best is better.",
    "chosen_key": "Column of the chosen response, where it is called otherwise.",
    "rejected_key": "Column of the rejected response, where it is called otherwise.",
    "prompt_key": "Column of the prompt, where it is called otherwise.",
    "model_type": "As for the policy.",
    "lora_dropout": "Dropout inside the adapters. Every other dropout of a model is turned off.",
    "strategy_name": "Engine of the role. docs/concepts/parallelism-and-layouts.md says which are there today.",
    "strategy_config": "Sizes of parallel axes. None other than 1 today: several workers are data parallel.",
    "device_mapping": "Global device ids, a worker each: a list, or text like `list(range(0,8))`. Roles may share.",
    "learning_rate": "Peak rate of AdamW.",
    "gradient_accumulation_steps": "Times per_device_train_batch_size in one optimizer step.",
    "weight_decay": "Decay of matrices; norms and biases are not decayed.",
    "adam_beta1": "AdamW's decay of the first moment.",
    "adam_beta2": "AdamW's decay of the second moment.",
    "adam_epsilon": "AdamW's epsilon.",
    "lr_scheduler_type": "Shape of the rate over the steps of the whole run.",
    "warmup_steps": "Optimizer steps that warm up; give this or warmup_ratio.",
    "gradient_checkpointing": "Compute activations again in the backward pass to save memory.",
    "truncation": "What happens to a pair longer than sequence_length.",
    "on_bad_row": "Stop at a row that cannot be read, leave such rows out, or collect them in a file.",
    "preprocessing_num_workers": "Processes that tokenise; the store has the same bytes whatever the number.",
    "mode": "How the reference is scored; docs/concepts/parallelism-and-layouts.md says what `auto` chooses.",
    "wandb_project": "Project on Weights & Biases.",
    "wandb_entity": "Team or user on Weights & Biases; the account's own when absent.",
}
TITLES = {"DPOConfig": "The run", "LossConfig": "The objective", "TrackerArgs": "Trackers"}
_BOUNDS = (("exclusiveMinimum", ">"), ("minimum", ">="), ("exclusiveMaximum", "<"), ("maximum", "<="))


def find_sections(section: Section, prefix: str = "") -> Iterator[tuple[str, Section]]:
    """Yield every section with the prefix of its keys, as it is when nothing is set."""
    yield prefix, section
    for name, field in type(section).model_fields.items():
        inner = inner_section(field.annotation)
        if inner is not None:
            yield from find_sections(getattr(section, name) or inner(), f"{prefix}{name}.")


def inner_section(annotation: Any) -> type[Section] | None:
    """Return the section that an annotation, optional or not, stands for."""
    for each in (annotation, *get_args(annotation)):
        if isinstance(each, type) and issubclass(each, Section):
            return each
    return None


def render() -> str:
    """Write all tables: one for each section, which may stand at several places."""
    places: dict[type[Section], dict[str, Section]] = {}
    for prefix, section in find_sections(DPOConfig()):
        places.setdefault(type(section), {})[prefix] = section
    tables = []
    for cls, where in places.items():
        objective = set(LossConfig.model_fields) if cls is DPOConfig else set()
        keys = [name for name, field in cls.model_fields.items() if inner_section(field.annotation) is None]
        own = [key for key in keys if key not in objective]
        if own:
            tables.append(_table(cls, where, own, TITLES.get(cls.__name__)))
        if objective:
            tables.append(_table(cls, where, [key for key in keys if key in objective], TITLES["LossConfig"]))
    known = {key for cls in places for key in cls.model_fields}
    if stray := sorted(set(MEANINGS) - known):
        raise ValueError(f"MEANINGS of scripts/config_doc.py names what is no key: {', '.join(stray)}")
    return "\n".join(tables)


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
    if "description" in schema:
        return " ".join(schema["description"].split())
    if key not in MEANINGS:
        raise ValueError(f"the config key {key} has no docstring; write one below its field")
    return MEANINGS[key]


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
    if schema["type"] == "array":
        return f"list of {schema['items']['type']}s"
    if schema["type"] == "object":
        inner = schema["additionalProperties"]
        return f"mapping to {_type(inner)}" if isinstance(inner, dict) else "mapping"
    bounds = [f"{sign} {schema[word]}" for word, sign in _BOUNDS if word in schema]
    return " ".join([schema["type"], ", ".join(bounds)]).strip()


def with_tables(page: str, tables: str) -> str:
    """Put the tables between the markers of a page."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{PAGE} must hold the lines {BEGIN!r} and {END!r}")
    return f"{before}{begin}\n\n{tables}\n{end}{after}"


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8"), render()), encoding="utf-8")
