"""A family gets the fastest layout that it allows, and a reason where it gets another."""

from __future__ import annotations

import pytest
from transformers import BloomConfig, GptOssConfig, JambaConfig, LlamaConfig, MambaConfig, PhimoeConfig, Qwen2MoeConfig

from tests.support.tiny_models import FAMILIES
from thresher.errors import UserError
from thresher.models.layouts.choose import choose_layout


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "llama_stray_window"])
def test_plain_transformers_share_their_prompts(family):
    layout, note = choose_layout("auto", [FAMILIES[family]], None, pad_id=0)
    assert (layout.name, note) == ("shared", None)


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        (MambaConfig(), "the model family mamba has linear_attention layers, which carry state from token to token"),
        (JambaConfig(), "the model family jamba has linear_attention layers, which carry state from token to token"),
        (BloomConfig(), "the model family bloom does not go through transformers' attention interface"),
        (GptOssConfig(), "the attention of the model family gpt_oss has sinks"),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_other_families_step_back_to_padded_and_say_why(family, reason):
    layout, note = choose_layout("auto", [family], None, pad_id=7)
    assert layout.name == "padded"
    assert layout.pad_id == 7
    assert note == f"layout padded, because {reason}"
    with pytest.raises(UserError, match=r"layout shared is not possible, because .*; use layout=auto or layout=padded"):
        choose_layout("shared", [family], None, pad_id=0)


def test_a_wish_is_granted():
    assert choose_layout("packed", [LlamaConfig()], None, 0)[0].name == "packed"
    assert choose_layout("padded", [LlamaConfig()], None, 0)[0].name == "padded"


def test_a_reference_of_another_family_must_bear_the_layout_too():
    layout, note = choose_layout("auto", [LlamaConfig(), BloomConfig()], None, 0)
    assert layout.name == "padded"
    assert "the model family bloom" in note


@pytest.mark.parametrize(
    "family", [Qwen2MoeConfig(sliding_window=64, use_sliding_window=True), PhimoeConfig(sliding_window=64)]
)
def test_a_window_that_may_live_in_the_mask_alone_is_not_packed(family):
    layout, note = choose_layout("auto", [family], None, 0)
    assert layout.name == "padded"
    assert "sliding window" in note


def test_a_named_attention_implementation_is_honoured():
    layout, note = choose_layout("auto", [LlamaConfig()], "eager", 0)
    assert layout.name == "padded"
    assert "attn_implementation is set to eager" in note
