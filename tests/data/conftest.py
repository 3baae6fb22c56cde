"""Fixtures of the data tests: tokenizers and source files; none needs the network."""

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


@pytest.fixture
def shared_data() -> Path:
    """Directory of the real data files."""
    return shared_path("data")


@pytest.fixture
def stories_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of 512 tokens without a chat template, in which `<s>` is both BOS and EOS."""
    return AutoTokenizer.from_pretrained(shared_path("models", "stories260K_hf"))


@pytest.fixture(scope="session")
def chat_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer whose template writes BOS, and a newline after each EOS."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


@pytest.fixture
def write_rows(tmp_path: Path) -> WriteRows:
    """A function that writes rows as JSON lines and returns the file name."""

    def write(*rows: Any, name: str = "rows.jsonl") -> str:
        path = tmp_path / name
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
        return str(path)

    return write
