"""Renamed values of settings keep their stored spelling, so that existing stores are reused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from thresher.data.prepare import prepare
from thresher.data.settings import DataSettings


@pytest.mark.parametrize(
    ("setting", "stored", "expected"),
    [
        ({}, "text", "45725033bfd10288cd7449118812208d4aaf2c31835ed9cad673de5a7070f3aa"),
        (
            {"special_tokens_in_text": "keep_as_text"},
            "text",
            "45725033bfd10288cd7449118812208d4aaf2c31835ed9cad673de5a7070f3aa",
        ),
        (
            {"special_tokens_in_text": "reject"},
            "refuse",
            "b5fc74b39387e1eab5168f4ed8740f19b31de7f6d5272255ce6b3a1a0ff89220",
        ),
    ],
    ids=["default", "keep_as_text", "reject"],
)
def test_a_renamed_value_does_not_change_the_fingerprint(
    monkeypatch: pytest.MonkeyPatch, setting: dict[str, Any], stored: str, expected: str
) -> None:
    """Recorded with tokenization version 2. Another value means that every store is prepared again."""
    monkeypatch.setattr(prepare, "tokenizer_digest", lambda tokenizer: "t" * 64)
    settings = DataSettings("a.jsonl", **setting)
    template: Any = SimpleNamespace(digest="d" * 64)
    sources = ["jsonl:" + "0" * 64]
    assert prepare.make_fingerprint(settings, None, template, sources) == expected  # type: ignore[arg-type]
    assert prepare.fingerprinted_settings(settings)["special_tokens_in_text"] == stored
