"""Tokenizers and files that the tests of `data/` share; nothing here needs the network."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_tokenizer import CHAT_TEMPLATE, make_tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

SHARED = Path(__file__).resolve().parents[3] / "shared"
WriteRows = Callable[..., str]


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The real files beside the checkout."""
    if not (SHARED / "data").is_dir():
        pytest.skip("needs ../shared/data, which is not beside this checkout")
    return SHARED / "data"


@pytest.fixture(scope="session")
def stories_tokenizer() -> PreTrainedTokenizerFast:
    """512 tokens, `<s>` is both BOS and EOS, no chat template."""
    if not (SHARED / "models" / "stories260K_hf").is_dir():
        pytest.skip("needs ../shared/models/stories260K_hf, which is not beside this checkout")
    return AutoTokenizer.from_pretrained(SHARED / "models" / "stories260K_hf")


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
