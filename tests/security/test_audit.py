"""The audit of the pinned packages finds affected versions as defined by the OSV schema."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
import zipfile
from email.message import Message
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from scripts import audit
from tests.support.paths import ROOT


def advisory(*events: dict[str, str], name: str = "Some.Package", **changes: Any) -> dict[str, Any]:
    ranges = [{"type": "ECOSYSTEM", "events": list(events)}] if events else []
    affected = {"package": {"ecosystem": "PyPI", "name": name}, "ranges": ranges}
    return {"id": "X-1", "summary": "bad", "affected": [affected | changes.pop("affected", {})], **changes}


def found(record: dict[str, Any], version: str = "2.5") -> list[str]:
    return audit.check_advisories(audit.Pins({"some-package": Version(version)}, ()), [record])


FROM_2_TO_3 = ({"introduced": "2.0"}, {"fixed": "3.0"})


def test_a_version_within_a_range_is_reported_with_the_fixed_version() -> None:
    assert found(advisory(*FROM_2_TO_3)) == ["some-package 2.5: X-1: bad; fixed in 3.0"]


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        *(("1.9", False), ("2.0rc1", False), ("2.0", True), ("2.0.post1", True), ("2.5", True)),
        *(("3.0rc1", True), ("3.0", False), ("4", False)),
    ],
)
def test_the_first_version_is_affected_and_the_fixed_one_is_not(version: str, expected: bool) -> None:
    assert bool(found(advisory(*FROM_2_TO_3), version)) == expected


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([{"introduced": "0"}], True),
        ([{"introduced": "0"}, {"last_affected": "2.5"}], True),
        ([{"introduced": "0"}, {"last_affected": "2.4"}], False),
        ([{"fixed": "3.0"}, {"introduced": "2.0"}], True),  # in any order
        ([{"introduced": "0"}, {"fixed": "1.0"}, {"introduced": "2.0"}, {"fixed": "2.6"}], True),
        ([{"introduced": "0"}, {"fixed": "1.0"}, {"introduced": "2.6"}], False),
        ([{"introduced": "0"}, {"limit": "2.0"}], False),
        ([{"introduced": "0"}, {"limit": "3.0"}], True),
        ([{"introduced": "0"}, {"limit": "*"}], True),
        ([], False),
    ],
)
def test_ranges_follow_the_schema(events: list[dict[str, str]], expected: bool) -> None:
    assert bool(found(advisory(*events))) == expected


def test_a_listed_version_is_found_in_any_spelling() -> None:
    assert found(advisory(affected={"versions": ["2.5.0", "not a version"]}))
    assert not found(advisory(affected={"versions": ["2.4", "not a version"]}))


def test_commit_ranges_are_ignored() -> None:
    git = {"type": "GIT", "repo": "r", "events": [{"introduced": "0"}, {"fixed": "abcdef"}]}
    assert not found(advisory(affected={"ranges": [git]}))


@pytest.mark.parametrize(
    "record",
    [
        advisory(*FROM_2_TO_3, withdrawn="2026-01-01T00:00:00Z"),
        advisory(*FROM_2_TO_3, name="another"),
        advisory(*FROM_2_TO_3, affected={"package": {"ecosystem": "npm", "name": "some-package"}}),
    ],
    ids=["withdrawn", "another package", "another ecosystem"],
)
def test_irrelevant_advisories_are_ignored(record: dict[str, Any]) -> None:
    assert found(record) == []


def test_an_advisory_can_be_ignored_by_any_of_its_names() -> None:
    pins = audit.Pins({"some-package": Version("2.5")}, ())
    record = advisory(*FROM_2_TO_3, aliases=["Y-2"])
    assert audit.check_advisories(pins, [record], ["Z"])
    assert not audit.check_advisories(pins, [record], ["Y-2"])


def test_an_advisory_that_cannot_be_parsed_is_an_error() -> None:
    with pytest.raises(audit.UnreadableError, match="X-1 on some-package cannot be read"):
        found(advisory({"introduced": "2.x"}))


def test_records_are_found_in_files_directories_and_archives(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "one.json").write_text(json.dumps({"id": "A"}))
    (tmp_path / "deep" / "many.json").write_text(json.dumps([{"id": "B"}, {"id": "C"}]))
    (tmp_path / "answer.json").write_text(json.dumps({"vulns": [{"id": "D"}]}))
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        archive.writestr("E.json", json.dumps({"id": "E"}))
    records = audit.read_advisories([tmp_path, tmp_path / "all.zip"])
    assert sorted(each["id"] for each in records) == ["A", "B", "C", "D", "E"]
    (tmp_path / "one.json").write_text('{"no": "id"}')
    with pytest.raises(audit.UnreadableError, match="does not contain OSV records"):
        list(audit.read_advisories([tmp_path / "one.json"]))


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        *(
            ("a>=1", "does not pin an exact"),
            ("a", "does not pin an exact"),
            ("a==1.*", "does not pin an exact"),
            ("a @ file:///a", "does not pin"),
        ),
        *(
            ("a===1", "does not pin an exact"),
            ("a==1.0-rc1", "write 1.0rc1"),
            ("A_b==1\na-B==2", "pinned twice"),
        ),
    ],
)
def test_a_line_without_an_exact_pin_is_reported(line: str, problem: str) -> None:
    assert problem in audit.read_pins(line).faults[0]


def test_comments_and_blank_lines_pin_nothing() -> None:
    pins = audit.read_pins("# why\n\nA_b==1.0  # because\n")
    assert (dict(pins.versions), pins.faults) == ({"a-b": Version("1.0")}, [])


def test_missing_and_unneeded_pins_are_reported() -> None:
    pins = audit.Pins({"packaging": Version("1.0"), "orphan": Version("1")}, ())
    problems = audit.check_requirements(pins, [Requirement("packaging>=20"), Requirement("rich")])
    assert "packaging is pinned to 1.0, but thresher requires >=20" in problems
    assert "rich, required by thresher, is not pinned" in problems
    assert "markdown-it-py, required by rich, is not pinned" in problems
    assert "orphan is pinned, but nothing requires it" in problems


def test_installed_versions_are_compared_with_the_pins() -> None:
    pins = audit.Pins({"pytest": Version("0.1"), "no-such-package": Version("1")}, ())
    problems = audit.check_installed(pins)
    assert problems[0].startswith("pytest is pinned to 0.1, but ")
    assert problems[1] == "no-such-package is pinned to 1, but not installed"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ([("License-Expression", "MIT")], {"MIT"}),
        ([("License-Expression", "Apache-2.0 WITH LLVM-exception AND (MIT OR Zlib)")], {"Apache-2.0", "MIT", "Zlib"}),
        ([("License-Expression", "MIT"), ("Classifier", "License :: OSI Approved :: BSD License")], {"MIT"}),
        (
            [("License", "a text"), *(("Classifier", f"License :: {each}") for each in ("OSI Approved :: A (B)", "C"))],
            {"A (B)", "C"},
        ),
        ([("License", "MPL-2.0 AND MIT"), ("Classifier", "Topic :: Text")], {"MPL-2.0", "MIT"}),
        ([], {"none"}),
    ],
)
def test_licences_are_read_from_the_most_precise_field(fields: list[tuple[str, str]], expected: set[str]) -> None:
    metadata = Message()
    for name, value in fields:
        metadata[name] = value
    assert audit.licences(metadata) == expected


def test_a_package_with_a_licence_that_nobody_examined_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "LICENCES", audit.LICENCES - {"BSD-3-Clause"})
    (problem,) = audit.check_licences([Requirement("idna")])
    assert problem == "idna has the licence 'BSD-3-Clause', which LICENCES in scripts/audit.py lacks"


def test_the_licences_of_all_required_packages_have_been_examined() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {requirement.name for _, requirement in audit.brought_along(audit.required(project))}
    assert len(names) > 150
    assert audit.EXAMINED.keys() <= names
    assert audit.check_licences(audit.required(project)) == []


def test_packages_of_the_cuda_build_of_torch_are_left_to_torch() -> None:
    assert list(audit.brought_along(map(Requirement, ["nvidia-nccl-cu13", "cuda-toolkit", "triton"]))) == []


def test_the_constraints_file_is_valid() -> None:
    """Checks the file alone: the installed packages may be newer than the pins that CI installs."""
    pins = audit.read_pins((ROOT / "constraints.txt").read_text())
    assert pins.faults == []
    assert len(pins.versions) > 100


def run_audit(*arguments: object) -> tuple[int, str]:
    command = [sys.executable, str(ROOT / "scripts" / "audit.py"), *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    return result.returncode, result.stdout + result.stderr


def test_the_script_exits_with_1_on_a_matching_advisory(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(advisory({"introduced": "0"}, name="Torch", id="X-2026")))
    code, printed = run_audit(path)
    assert code == 1
    assert "torch 2.13.0: X-2026: bad; no fixed version is known" in printed
    assert "X-2026" not in run_audit(path, "--ignore", "X-2026")[1]
    path.write_text("{")
    assert run_audit(path)[0] == 2
    assert run_audit(tmp_path / "gone.json")[0] == 2
