"""Where a model is: directories, GGUF files, and names on the Hub, which must not cost minutes without a network."""

from __future__ import annotations

import time

import huggingface_hub.constants
import pytest

from thresher.errors import UserError
from thresher.models.loading.load import load_model_config, load_tokenizer
from thresher.models.loading.location import hub_arguments, hub_name

NAME = "some-org/no-such-model"


@pytest.mark.parametrize("name", ["one", "org/one", "org/one@branch/a", "n" * 5000, "/" + "n" * 5000, "two words", "."])
def test_a_name_is_told_from_a_path(name):
    is_path = name in ("two words", ".") or name.startswith("/")
    bare, at, revision = name.partition("@")
    assert hub_name(name) == (None if is_path else bare)
    assert hub_arguments(name) == (bare, {"revision": revision} if at else {})


@pytest.mark.parametrize("load", [load_tokenizer, load_model_config])
def test_a_hub_name_that_is_not_cached_is_rejected_in_offline_mode(load, monkeypatch, tmp_path):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UserError) as raised:
        load(NAME)
    assert str(raised.value) == (
        f"{NAME} is neither a model directory nor in the Hugging Face cache, and HF_HUB_OFFLINE is set; give the path "
        f"of a model directory, or run `hf download {NAME}` with a network"
    )


@pytest.mark.parametrize("load", [load_tokenizer, load_model_config])
def test_a_hub_name_without_a_network_is_rejected_within_seconds(load, monkeypatch, tmp_path):
    """transformers alone retries for 24 seconds per file."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:1")
    started = time.monotonic()
    with pytest.raises(UserError) as raised:
        load(NAME)
    assert time.monotonic() - started < 8
    message = str(raised.value)
    assert message.startswith(f"{NAME} is not a model directory, and the Hugging Face Hub cannot be reached (")
    assert message.endswith("give the path of a model directory, or set HF_HUB_OFFLINE=1 if the model is in the cache")
