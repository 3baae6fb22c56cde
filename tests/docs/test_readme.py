"""What the README claims is what the tests cover."""

from __future__ import annotations

import re

from tests.support.model_table import README, model_table, written_table
from tests.support.paths import ROOT


def test_the_table_of_architectures_is_the_one_that_the_tests_cover() -> None:
    assert written_table(README.read_text(encoding="utf-8")) == model_table(), (
        "run: python -m tests.support.model_table"
    )


def test_every_test_file_that_the_readme_names_exists() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)`", README.read_text(encoding="utf-8"))
    assert len(named) >= 6
    assert [name for name in named if not (ROOT / name).is_file()] == []
