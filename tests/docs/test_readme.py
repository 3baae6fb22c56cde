"""What the README claims is what the tests cover."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.model_table import PAGE, model_table, num_packed_architectures, written_table
from tests.support.paths import ROOT
from tests.training.test_resume import KILLS
from thresher.builders.hardware import GPUS
from thresher.importers.convert import convert
from thresher.losses import loss_names
from thresher.observability.health.rules import RULES

README = ROOT / "README.md"
GUARANTEES = ROOT / "docs" / "reference" / "guarantees.md"
NUMBERS = {9: "nine"}


def test_the_table_of_architectures_is_the_one_that_the_tests_cover() -> None:
    assert written_table(PAGE.read_text(encoding="utf-8")) == model_table(), "run: python -m tests.support.model_table"


def test_every_test_file_that_the_guarantees_name_exists() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)`", GUARANTEES.read_text(encoding="utf-8"))
    assert len(named) >= 6
    assert [name for name in named if not (ROOT / name).is_file()] == []


def test_the_lines_of_an_imported_config_are_those_that_the_import_writes(tmp_path: Path) -> None:
    shown = re.findall(r"^```yaml\n(.*?)^```$", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    theirs, ours = shown[-2:]
    (tmp_path / "trl.yaml").write_text(theirs, encoding="utf-8")
    written = convert(tmp_path / "trl.yaml")[1].splitlines()
    assert [line for line in written if line in ours.splitlines()] == ours.splitlines()


def test_the_counts_in_the_readme_are_those_of_the_code() -> None:
    text = " ".join(README.read_text(encoding="utf-8").split())
    counts = {
        rf"DPO and {len(loss_names()) - 1} related losses": "losses besides DPO",
        rf"\| {len(loss_names())}, weighted sums": "losses",
        rf"any of {len(GPUS)} GPU models": "GPUs of `thresher plan`",
        rf"{len(RULES)} health rules": "health rules",
        rf"killed with SIGKILL at {NUMBERS[len(KILLS)]} points": "kills of a run",
        rf"; {num_packed_architectures()} architectures tested in packed rows": "architectures",
    }
    assert [what for pattern, what in counts.items() if not re.search(pattern, text)] == []


def test_the_first_page_of_the_docs_begins_as_the_readme_does() -> None:
    first = (ROOT / "docs" / "index.md").read_text(encoding="utf-8").splitlines()[2]
    assert README.read_text(encoding="utf-8").splitlines()[2].startswith(first)
