"""The table of docs/scale/memory.md is the one that its command prints."""

from __future__ import annotations

from benchmarks.plan_table import METHODS, rows
from tests.support.paths import ROOT


def test_the_page_has_the_table_that_the_command_prints():
    page = (ROOT / "docs" / "scale" / "memory.md").read_text(encoding="utf-8")

    table = list(rows())

    assert len(table) == 2 + len(METHODS)
    assert "\n".join(table) in page
