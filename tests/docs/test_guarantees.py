"""docs/guarantees.md: every guarantee names tests that exist, and none was lost."""

from __future__ import annotations

import re

from tests.support.paths import ROOT

# a guarantee may be added, and is removed only together with a lower number here
NUM_GUARANTEES = 56
_ROW = re.compile(r"^\| (?P<guarantee>.+) \| (?P<tests>.+) \|$")


def rows() -> list[tuple[str, str]]:
    lines = (ROOT / "docs" / "guarantees.md").read_text(encoding="utf-8").splitlines()
    found = [match for line in lines if (match := _ROW.match(line))]
    return [(match["guarantee"], match["tests"]) for match in found if match["tests"] != "tests"]


def test_no_guarantee_was_lost() -> None:
    assert len({guarantee for guarantee, _ in rows()}) >= NUM_GUARANTEES


def test_every_guarantee_names_files_that_exist_and_test_something() -> None:
    for guarantee, tests in rows():
        names = re.findall(r"`([^`]+)`", tests)
        assert ", ".join(f"`{name}`" for name in names) == tests, f"only names of files belong there: {tests}"
        assert any(name.startswith("tests/") for name in names), guarantee
        for name in names:
            assert (ROOT / name).is_file(), f"{name}, which tests: {guarantee}"
            if name.startswith("tests/"):
                assert re.search(r"^\s*(async )?def test_", (ROOT / name).read_text(encoding="utf-8"), re.MULTILINE), (
                    name
                )
