"""docs/train/ and docs/concepts/: losses, formats, metrics and rules are those of the code, and examples are valid."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from docutils.utils.math import latex2mathml

from tests.support.loss_cases import objective_of, random_pairs
from tests.support.paths import ROOT
from thresher.config import parse_config
from thresher.data.rows.formats import FORMATS, detect_format, to_preference_row
from thresher.losses import loss_names, make_loss
from thresher.observability.health.rules import RULES

TRAIN, CONCEPTS = ROOT / "docs" / "train", ROOT / "docs" / "concepts"
PAGES = sorted([*TRAIN.glob("*.md"), CONCEPTS / "losses.md", CONCEPTS / "precision.md"])
MAX_WORDS = 1500
# what a page's YAML block is added to
BASE = {
    "pretrain": "model",
    "validation": {"split": 0.1},
    "eval_steps": 10,
    "actor_train": {"data_args": {"file_name": "train.jsonl"}},
}
_ROW = re.compile(r"^\| (`\w+`[^|]*) \|(.*)\|$", re.MULTILINE)


def merged(base: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    both = {key: merged(base[key], value) for key, value in change.items() if isinstance(base.get(key), Mapping)}
    return {**base, **change, **both}


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def example_rows() -> list[tuple[str, str]]:
    """Format, and the rows that are shown for it."""
    section = text_of(TRAIN / "data.md").partition("\n## Does my data work?\n")[2].partition("\n### ")[0]
    found = []
    for match in re.finditer(r"```json\n(.*?)```", section, re.DOTALL):
        paragraph = section[: match.start()].rstrip().rpartition("\n\n")[2]
        name = re.match(r"`(\w+)`", paragraph)
        assert name, paragraph
        found.append((name[1], match[1]))
    return found


def parse_rows(text: str) -> list[dict[str, object]]:
    decoder, rows, text = json.JSONDecoder(), [], text.strip()
    while text:
        row, end = decoder.raw_decode(text)
        rows.append(row)
        text = text[end:].strip()
    return rows


def test_the_page_shows_rows_of_eight_formats() -> None:
    assert [name for name, _ in example_rows()] == [
        "prompt",
        "prompt",
        "instruction",
        "conversations",
        "whole_conversations",
        "labelled_completions",
        "answered_messages",
        "instruction_completions",
    ]


@pytest.mark.parametrize(("name", "text"), example_rows())
def test_an_example_row_is_read_in_the_format_that_the_page_names(name: str, text: str) -> None:
    for row in parse_rows(text):
        found = detect_format(row, {}, "data.md")
        assert found.name == name
        read = to_preference_row(row, found, {})
        assert len({str(response) for response in read.responses}) == len(read.responses)


def test_the_data_page_lists_every_format_and_its_columns() -> None:
    page = text_of(TRAIN / "data.md")
    for each in FORMATS:
        assert f"`{each.name}`" in page, each.name
        assert all(column in page for column in each.required), each.name


def formulas() -> list[str]:
    """The losses that have a formula."""
    page = text_of(CONCEPTS / "losses.md").partition("\n## On the margin\n")[2].partition("\n## In the first step\n")[0]
    return [re.findall(r"`(\w+)`", match[1])[0] for match in _ROW.finditer(page)]


def test_every_loss_has_a_formula() -> None:
    assert sorted(formulas()) == sorted(loss_names())


def test_the_loss_of_the_first_step_is_the_one_that_the_page_shows() -> None:
    values = {
        r"$\ln\, 2$, or 0.693": lambda loss: math.log(2),
        r"$2 \ln\, 2$, or 1.386": lambda loss: 2 * math.log(2),
        r"$1$": lambda loss: 1.0,
        r"$1/2$": lambda loss: 0.5,
        r"$(1 + \ln\, 2)/2$, or 0.847": lambda loss: (1 + math.log(2)) / 2,
        r"$1/(4\beta^2)$": lambda loss: 1 / (4 * loss.beta**2),
        r"$1/(2\beta^2)$": lambda loss: 1 / (2 * loss.beta**2),
        r"$-\ln\, 2 - [\ln(1-\epsilon) + \ln\epsilon]/2$": lambda loss: (
            -math.log(2) - (math.log(1 - loss.label_smoothing) + math.log(loss.label_smoothing)) / 2
        ),
    }
    page = text_of(CONCEPTS / "losses.md").partition("\n## In the first step\n")[2].partition("\nWeights")[0]
    shown = {
        loss: text
        for text, losses in re.findall(r"^\| (\$.+?) \| (`.+) \|$", page, re.MULTILINE)
        for loss in re.findall(r"`(\w+)`", losses)
    }
    constant = {name for name in loss_names() if make_loss(name, {}).zero_margin_loss is not None}
    assert set(shown) == constant
    for name, text in shown.items():
        loss = make_loss(name, {})
        assert loss.zero_margin_loss == pytest.approx(values[text](loss)), name


def test_the_table_of_modifiers_is_what_the_losses_support() -> None:
    page = text_of(CONCEPTS / "losses.md").partition("\n## Which modifiers apply to which loss\n")[2]
    shown = {}
    for match in _ROW.finditer(page.partition("\n## ")[0]):
        listed = match[2].partition("(")[0].partition(";")[0]
        for loss in re.findall(r"`(\w+)`", match[1]):
            shown[loss] = set(re.findall(r"`(\w+)`", listed))
    assert shown == {name: set(make_loss(name, {}).supports) for name in loss_names()}


def test_every_loss_with_a_starting_point_exists() -> None:
    page = text_of(TRAIN / "choose-a-loss.md").partition("\n## Starting points\n")[2]
    named = {name for row in re.findall(r"^\| (`.*?) \|", page, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    assert named
    assert named <= set(loss_names())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_formula_can_be_drawn(page: Path) -> None:
    plain = re.sub(r"^```.*?^```$", "", text_of(page), flags=re.MULTILINE | re.DOTALL)
    for formula in re.findall(r"\$([^$\n]+)\$", plain):
        drawn = latex2mathml.tex2mathml(formula)
        assert "<munderover>" not in drawn, f"{formula}: the subscript would be drawn below the letter"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_yaml_block_of_a_page_is_valid(page: Path) -> None:
    for block in re.findall(r"^```yaml\n(.*?)^```$", text_of(page), re.MULTILINE | re.DOTALL):
        base = {"pretrain": "model"} if "sources:" in block else BASE  # with its own data
        parse_config(merged(base, yaml.safe_load(block)))


def test_the_metrics_page_names_every_metric_of_the_objective() -> None:
    page = text_of(TRAIN / "metrics.md")
    metrics = objective_of("sigmoid")(random_pairs()).metrics
    assert [name for name in metrics if f"`{name}`" not in page] == []


def test_the_metrics_page_names_only_rules_that_exist() -> None:
    named = set(re.findall(r"rule `(\w+)`", text_of(TRAIN / "metrics.md")))
    assert named
    assert named <= {rule.name for rule in RULES}


@pytest.mark.parametrize("page", sorted(TRAIN.glob("*.md")), ids=lambda page: page.stem)
def test_no_page_is_too_long_to_read(page: Path) -> None:
    assert len(text_of(page).split()) <= MAX_WORDS
