"""The start-up probe accepts the families that packed rows compute as transformers does, and says what others lack."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support.probed_families import PACKED, PADDED, default_config
from tests.support.tiny_models import FAMILIES
from thresher.errors import UserError
from thresher.models import probe
from thresher.models.attention import interface
from thresher.models.attention.segments import Segment
from thresher.models.layouts import choose_layout
from thresher.models.probe import DIRECTORY_NAME, shrink, what_packed_rows_lack


@pytest.mark.parametrize("family", PACKED)
def test_a_family_at_its_published_size_passes(family):
    """Its default config, of which the probe keeps one layer of each kind."""
    layout, note = choose_layout("auto", [default_config(family)], None, 0, probe=what_packed_rows_lack)
    assert (layout.name, note) == ("shared", None)
    assert probe._found  # not only checked on pairs


def test_a_family_passes_with_any_vocabulary():
    config = copy.deepcopy(FAMILIES["llama"])
    config.vocab_size = 20
    assert choose_layout("auto", [config], None, 0, probe=what_packed_rows_lack)[0].name == "shared"


@pytest.mark.parametrize("family", PADDED)
def test_a_family_that_is_rejected_says_what_is_missing(family):
    _, lacks = PADDED[family]
    layout, note = choose_layout("auto", [default_config(family)], None, 0, probe=what_packed_rows_lack)
    assert (layout.name, note) == ("padded", f"using layout padded: {lacks}")


@pytest.fixture
def forgetful(monkeypatch) -> None:
    monkeypatch.setattr(probe, "_found", {})


def attention_that(change: Callable[..., tuple]) -> Callable[..., torch.Tensor]:
    """The attention of packed rows, with other arguments than the model's."""
    original = interface.segment_attention

    def wrong(query, key, value, visibility, scale, softcap, window, sinks):
        return original(query, key, value, *change(visibility, scale, softcap, window, sinks))

    return wrong


def everything_is_one_segment(visibility, *rest):
    rows = visibility.segments[-1].stop
    return dataclasses.replace(visibility, segments=(Segment(0, rows),)), *rest


WRONG = {
    "window": (
        "mistral",
        lambda visibility, scale, softcap, _window, sinks: (visibility, scale, softcap, None, sinks),
        "the model family mistral has a sliding window, which packed rows of it ignore",
    ),
    "window besides sinks": (
        "gpt_oss",
        lambda visibility, scale, softcap, _window, sinks: (visibility, scale, softcap, None, sinks),
        "the model family gpt_oss has a sliding window, which packed rows of it ignore",
    ),
    "sinks": (
        "gpt_oss",
        lambda visibility, scale, softcap, window, _sinks: (visibility, scale, softcap, window, None),
        "the model family gpt_oss has attention sinks, which packed rows of it ignore",
    ),
    "soft cap": (
        "gemma2",
        lambda visibility, scale, _softcap, window, sinks: (visibility, scale, None, window, sinks),
        "the model family gemma2 has soft-capped attention scores, which packed rows of it ignore",
    ),
    "scale": (
        "llama",
        lambda visibility, scale, *rest: (visibility, scale * 1.1, *rest),
        "log-probabilities of layout `shared` differ from the model's original forward",
    ),
    "leak": ("llama", everything_is_one_segment, "log-probabilities of layout `shared` differ"),
}


@pytest.mark.usefixtures("forgetful")
@pytest.mark.parametrize(("family", "change", "message"), WRONG.values(), ids=WRONG)
def test_wrong_attention_is_caught(family, change, message, monkeypatch):
    monkeypatch.setattr(interface, "segment_attention", attention_that(change))
    assert what_packed_rows_lack(FAMILIES[family]).startswith(message)
    with pytest.raises(UserError, match=r"layout shared is not possible: .*; use layout=auto or layout=padded"):
        choose_layout("shared", [FAMILIES[family]], None, 0, probe=what_packed_rows_lack)


@pytest.mark.usefixtures("forgetful")
def test_what_was_found_is_remembered_until_the_code_changes(monkeypatch, reference_cache):
    config, calls = FAMILIES["llama"], []
    original = probe._probe
    monkeypatch.setattr(probe, "_probe", lambda small: calls.append(small) or original(small))
    assert what_packed_rows_lack(config) is None
    (record,) = (reference_cache / DIRECTORY_NAME).iterdir()

    def ask_another_process() -> int:
        monkeypatch.setattr(probe, "_found", {})
        before = len(calls)
        assert what_packed_rows_lack(config) is None
        return len(calls) - before

    assert ask_another_process() == 0
    for damaged in ("", "[]", json.dumps(json.loads(record.read_text()) | {"key": "of another config"})):
        Path(record).write_text(damaged)
        assert ask_another_process() == 1
    monkeypatch.setattr(probe, "_code_digest", lambda: "changed")
    assert ask_another_process() == 1


@pytest.mark.usefixtures("forgetful")
def test_a_family_that_cannot_be_shrunk_is_left_to_the_check_on_pairs(monkeypatch, caplog, reference_cache):
    def fail(_config, **_settings):
        raise RuntimeError("no such size")

    monkeypatch.setattr(probe, "build_tiny_model", fail)
    with caplog.at_level("INFO"):
        assert what_packed_rows_lack(FAMILIES["llama"]) is None
    assert "the model family llama cannot be probed, only checked on pairs: no such size" in caplog.text
    assert not (reference_cache / DIRECTORY_NAME).exists()


def test_the_shrunken_config_has_one_layer_of_each_kind_and_a_short_reach():
    small = shrink(default_config("gpt_oss"))
    assert small.layer_types == ["sliding_attention", "full_attention"]
    assert (small.sliding_window, small.head_dim, small.num_attention_heads, small.num_key_value_heads) == (4, 64, 4, 2)
    text = shrink(default_config("gemma4")).get_text_config()
    assert text.num_hidden_layers == len(text.layer_types) <= 4
    assert text.sliding_window == 4
    # one size of a family is probed like any other
    assert shrink(default_config("llama")).to_dict() == shrink(FAMILIES["llama"].__class__(head_dim=128)).to_dict()
