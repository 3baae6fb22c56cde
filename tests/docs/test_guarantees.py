"""docs/reference/guarantees.md: every guarantee names tests that exist and run in any clone, and none was lost."""

from __future__ import annotations

import re
from collections import defaultdict

import pytest

from tests.support.paths import ROOT, shared_path

PAGE = ROOT / "docs" / "reference" / "guarantees.md"
# a guarantee may be added, and is removed only together with a lower number here
NUM_GUARANTEES = 72
_ROW = re.compile(r"^\| (?P<guarantee>.+) \| (?P<tests>.+) \|$")
_REAL_FILE = re.compile(r"^pytestmark = .*\bmark\.real\b", re.MULTILINE)


def rows() -> list[tuple[str, str]]:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    found = [match for line in lines if (match := _ROW.match(line))]
    return [(match["guarantee"], match["tests"]) for match in found if match["tests"] != "tests"]


def files_of_the_summary() -> list[str]:
    """Return the test file of each guarantee in the page's summary, to which the README links."""
    section = PAGE.read_text(encoding="utf-8").partition("\n## In short\n")[2].partition("\n## ")[0]
    return re.findall(r"\| `(tests/[\w/]+\.py)` \|$", section, re.MULTILINE)


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


def test_no_guarantee_depends_on_files_that_are_skipped_without_the_real_data() -> None:
    for guarantee, tests in rows():
        texts = [(ROOT / name).read_text(encoding="utf-8") for name in re.findall(r"`(tests/[^`]+)`", tests)]
        assert not all(_REAL_FILE.search(text) for text in texts), guarantee


@pytest.mark.parametrize("name", files_of_the_summary())
def test_a_plain_clone_runs_every_test_behind_a_guarantee_of_the_summary(
    name: str, request: pytest.FixtureRequest
) -> None:
    """Each test that CI runs has a case without the mark `real`. A case without it fails if it reads real data."""
    cases: defaultdict[str, list[set[str]]] = defaultdict(list)
    for item in pytest.Module.from_parent(request.session, path=ROOT / name).collect():
        assert isinstance(item, pytest.Function), item
        cases[item.originalname].append({mark.name for mark in item.iter_markers()})
    in_ci = {test: [each for each in marks if "hand" not in each] for test, marks in cases.items()}
    assert any(in_ci.values()), "CI runs none of its tests"
    assert [test for test, marks in in_ci.items() if marks and all("real" in each for each in marks)] == []


def test_the_summary_has_six_guarantees_and_the_readme_links_to_it() -> None:
    assert len(files_of_the_summary()) == 6
    assert "docs/reference/guarantees.md" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_a_test_without_the_mark_real_fails_if_it_reads_real_data() -> None:
    with pytest.raises(pytest.fail.Exception, match=r"reads \.\./shared/models.*; mark the test `real`"):
        shared_path("models")
