"""Values of settings that were renamed keep their stored spelling, so that stores on disk are found again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from thresher.cli.prepare import _as_special_tokens_in_text
from thresher.data.prepare import fingerprint as identity
from thresher.data.settings import DataSettings


@pytest.mark.parametrize(
    ("setting", "stored", "fingerprint"),
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
def test_stores_of_versions_with_other_names_are_found_again(
    monkeypatch: pytest.MonkeyPatch, setting: dict[str, Any], stored: str, fingerprint: str
) -> None:
    """The fingerprints were recorded when the values were called `text` and `refuse`."""
    monkeypatch.setattr(identity, "tokenizer_digest", lambda tokenizer: "t" * 64)
    settings = DataSettings("a.jsonl", **setting)
    template: Any = SimpleNamespace(digest="d" * 64)
    assert identity.make_identity(settings, None, template, ["jsonl:" + "0" * 64]) == fingerprint  # type: ignore[arg-type]
    assert identity.fingerprinted_settings(settings)["special_tokens_in_text"] == stored


def test_prepare_takes_the_earlier_spelling_of_the_option() -> None:
    spellings = ("text", "refuse", "keep_as_text", "reject", "other")
    assert [_as_special_tokens_in_text(each) for each in spellings] == [
        *("keep_as_text", "reject"),
        *("keep_as_text", "reject", "other"),
    ]
