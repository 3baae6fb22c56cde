"""docs/scale/ and docs/operate/: examples are valid, and messages, rules and limits are those of the code."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support import toy_strategy
from tests.support.paths import ROOT
from thresher.config import parse_config
from thresher.observability.health import history, rules

DOCS = ROOT / "docs"
PAGES = sorted([*(DOCS / "scale").glob("*.md"), *(DOCS / "operate").glob("*.md")])
MAX_WORDS = 1500
# what a page's YAML block is added to
BASE = {"pretrain": "model", "actor_train": {"data_args": {"file_name": "train.jsonl"}}}
# fixed parts of the messages that docs/operate/troubleshooting.md quotes
MESSAGES = (
    "the policy does not learn which side is preferred",
    "the chosen responses become less likely while the margin grows",
    " is not finite (pair",
    "the loss or gradient was not finite in ",
    "its gradient overflows fp16; the loss scale is now ",
    "killed by a signal, often SIGKILL because memory ran out",
    " tokenizer processes was killed, most likely out of memory",
    "the tokenizer has no chat template; use ",
    "; check ray_address, and that RAY_AUTH_TOKEN_PATH is the file with the cluster's token",
    "; set RAY_AUTH_TOKEN_PATH to a file with the cluster's token",
    ".device_mapping requests ",
    " CPUs, but other work uses them ",
    " needs GPU ",
    "Ray did not start in time on this machine, twice",
    " contains checkpoints of a run with other settings (changed since the checkpoint: ",
    " belongs to another run: its ",
    " contains checkpoints of an earlier run, up to ",
    " is in use by ",
    " has completed all steps; set a different output_dir to train again",
    "workers are stuck: none has made progress for ",
    ": another rank hangs, or the step needs longer than heartbeat_timeout=",
    " differ from the model's original forward by ",
    "policy and reference start from the same weights but disagree by ",
)


def merged(base: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    both = {key: merged(base[key], value) for key, value in change.items() if isinstance(base.get(key), Mapping)}
    return {**base, **change, **both}


def yaml_blocks() -> Iterator[tuple[str, str]]:
    for page in PAGES:
        for match in re.finditer(r"^( *)```yaml\n(.*?)^\1```$", page.read_text(), re.MULTILINE | re.DOTALL):
            yield str(page.relative_to(DOCS)), textwrap.dedent(match[2])


def texts_of_the_source() -> set[str]:
    """Every string literal, and every part of an f-string between its values."""
    found = set()
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_a_page_has_at_most_1500_words(page: Path) -> None:
    assert len(page.read_text(encoding="utf-8").split()) <= MAX_WORDS


@pytest.mark.parametrize(("page", "block"), list(yaml_blocks()))
def test_a_yaml_block_is_a_valid_change_of_a_config(page: str, block: str) -> None:
    parse_config(merged(BASE, yaml.safe_load(block)))


def test_troubleshooting_quotes_messages_that_the_code_prints() -> None:
    page = (DOCS / "operate" / "troubleshooting.md").read_text(encoding="utf-8")
    source = texts_of_the_source()
    for message in MESSAGES:
        assert any(message in text for text in source), f"no message of the code contains {message!r}"
        assert message in page, message


def test_the_health_page_lists_every_rule_with_its_limits() -> None:
    page = (DOCS / "operate" / "health.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", page, re.MULTILINE))
    assert sorted(rows) == sorted(rule.name for rule in rules.RULES)
    limits = {
        "likelihood_displacement": [f"{rules.NLL_RISE} nats"],
        "length_exploitation": [
            f"{rules.LENGTH_PAIRS} pairs",
            f"{rules.LENGTH_EXCESS:.0%}".removesuffix("%"),
            f"{100 * rules.LENGTH_PREFERENCE:.0f} %",
        ],
        "large_kl": [f"{rules.KL_PER_TOKEN} nats"],
        "saturated_rewards": [str(rules.SATURATED_ACCURACY), f"{100 * rules.SATURATED_LOSS_SHARE:.0f} %"],
        "chance_accuracy": [f"{rules.CHANCE_PAIRS:,} pairs", str(rules.CHANCE_ACCURACY), "fifth"],
        "initial_loss": [f"{rules.INITIAL_LOSS_OFF} off"],
        "gradient_spikes": [f"{rules.NUM_SPIKES} of the last {rules.SPIKE_RECORDS}", f"{rules.SPIKE_FACTOR:.0f} times"],
        "repetition": [f"{100 * rules.REPETITION_EXCESS:.0f} points"],
        "validation_below_chance": [f"{rules.NUM_STANDARD_ERRORS:.0f} standard errors"],
        "overfitting": [f"{100 * rules.OVERFITTING_RISE:.0f} %", f"{rules.NUM_STANDARD_ERRORS:.0f} standard errors"],
        "repeated_data": [f"{100 * rules.DUPLICATE_SHARE:.0f} %"],
    }
    for name, numbers in limits.items():
        assert all(number in rows[name] for number in numbers), (name, numbers)
    assert f"mean of the first {history.WINDOW_PAIRS} pairs" in page


def test_the_imports_of_the_engine_page_resolve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page describes a package, which is installed here."""
    monkeypatch.syspath_prepend(toy_strategy.install(tmp_path))
    page = (DOCS / "internals" / "add-an-engine.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert blocks
    for block in blocks:
        imports = [each for each in ast.parse(block).body if isinstance(each, ast.Import | ast.ImportFrom)]
        exec(compile(ast.Module(imports, []), "add-an-engine.md", "exec"), {})  # noqa: S102
