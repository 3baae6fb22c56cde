"""Renamed values of settings keep their stored spelling, so that existing stores are reused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from thresher.cli.prepare import _as_special_tokens_in_text
from thresher.data.prepare import fingerprint
from thresher.data.settings import DataSettings


@pytest.mark.parametrize(
    ("setting", "stored", "expected"),
    [
        ({}, "text", "079de6aba63004a6e6790c622a9ace2852cd1944757f674c0770d2ff2dd7ebc0"),
        (
            {"special_tokens_in_text": "keep_as_text"},
            "text",
            "079de6aba63004a6e6790c622a9ace2852cd1944757f674c0770d2ff2dd7ebc0",
        ),
        (
            {"special_tokens_in_text": "reject"},
            "refuse",
            "0fb1ba77c9d3853e72ac120e4c8850b3aa5cda291755bceb92e0f2db0d319d9f",
        ),
    ],
    ids=["default", "keep_as_text", "reject"],
)
def test_a_renamed_value_does_not_change_the_fingerprint(
    monkeypatch: pytest.MonkeyPatch, setting: dict[str, Any], stored: str, expected: str
) -> None:
    """The expected fingerprints were recorded when the values were named `text` and `refuse`."""
    monkeypatch.setattr(fingerprint, "tokenizer_digest", lambda tokenizer: "t" * 64)
    settings = DataSettings("a.jsonl", **setting)
    template: Any = SimpleNamespace(digest="d" * 64)
    sources = ["jsonl:" + "0" * 64]
    assert fingerprint.make_fingerprint(settings, None, template, sources) == expected  # type: ignore[arg-type]
    assert fingerprint.fingerprinted_settings(settings)["special_tokens_in_text"] == stored


def test_prepare_accepts_the_old_spelling_of_the_option() -> None:
    spellings = ("text", "refuse", "keep_as_text", "reject", "other")
    assert [_as_special_tokens_in_text(each) for each in spellings] == [
        *("keep_as_text", "reject"),
        *("keep_as_text", "reject", "other"),
    ]
