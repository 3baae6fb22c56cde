"""Control characters from rows, file names, stores and caches are escaped before they reach a terminal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.attacks import CommandLine, Run
from thresher.redact import escape_control_chars

TITLE = "\x1b]0;mine\x07"
CLEAR = "\x1b[2J\x9b31m"


def is_harmless(text: str) -> bool:
    return not any(ord(character) < 32 and character not in "\n\t" for character in text) and "\x9b" not in text


@pytest.mark.parametrize("text", [TITLE, CLEAR, "\r", "\b\b", "\x7f", "\x00"])
def test_control_characters_are_escaped(text: str) -> None:
    assert is_harmless(escape_control_chars(f"a{text}b"))
    assert escape_control_chars("a\tb\nc é \U0001f600") == "a\tb\nc é \U0001f600"
    assert escape_control_chars("a\u202eb\u2028c\u2066") == "a\\u202eb\\u2028c\\u2066"  # reverse or break a line


def test_rows_and_file_names_are_escaped(attacked: Run, thresher: CommandLine, tmp_path: Path) -> None:
    valid = {"prompt": "w4 ", "chosen": "w5", "rejected": "w6", f"{TITLE}column": 1}
    bad = {"prompt": [{"role": f"{TITLE}judge", "content": "x"}], "chosen": CLEAR, "rejected": "a"}
    path = tmp_path / f"{CLEAR}rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in (valid, bad)))
    for how in ("fail", "skip"):
        options = ("--on-bad-row", how, "--template", "raw", "--model", attacked.model)
        result = thresher("prepare", path, *options, "--output", tmp_path / "store")
        assert "rows.jsonl" in result.text
        assert is_harmless(result.text)


def test_stores_and_caches_are_escaped(attacked: Run, thresher: CommandLine) -> None:
    manifest = attacked.store / "manifest.json"
    values = json.loads(manifest.read_text())
    values["report"]["files"][0]["name"] = f"{TITLE}file"
    values["report"]["bad_reasons"] = {f"[red]{CLEAR}reason": 1}
    values["report"]["truncated"] = {f"[red]{CLEAR}kind": 1}
    values["template"] = TITLE
    manifest.write_text(json.dumps(values))
    shown = thresher("inspect", attacked.store)
    assert shown.code == 0
    assert is_harmless(shown.text)
    assert "[red]" in shown.text  # as text, not as markup
    (reference,) = attacked.cache.iterdir()
    (reference / "identity.json").write_text(json.dumps({"model": f"[red]{TITLE}m", "dtype": CLEAR}))
    listed = thresher("cache", "ls", "--cache-dir", attacked.cache)
    assert listed.code == 0
    assert is_harmless(listed.text)
    assert "[red]" in listed.text
