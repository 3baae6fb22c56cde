"""Tokenizers and files that the tests of `data/` share; nothing here needs the network."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tests.support.paths import shared_path
from tests.support.small_tokenizer import CHAT_TEMPLATE, make_tokenizer

WriteRows = Callable[..., str]


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The real files beside the checkout."""
    return shared_path("data")


@pytest.fixture(scope="session")
def stories_tokenizer() -> PreTrainedTokenizerFast:
    """512 tokens, `<s>` is both BOS and EOS, no chat template."""
    return AutoTokenizer.from_pretrained(shared_path("models", "stories260K_hf"))


@pytest.fixture(scope="session")
def chat_tokenizer() -> PreTrainedTokenizerFast:
    """Its template writes BOS, and a newline after each EOS."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


@pytest.fixture
def write_rows(tmp_path: Path) -> WriteRows:
    """Write rows as JSON lines and return the file's name."""

    def write(*rows: Any, name: str = "rows.jsonl") -> str:
        path = tmp_path / name
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
        return str(path)

    return write
