"""A family gets the fastest layout that it allows, and a reason where it gets another."""

from __future__ import annotations

import pytest
from tiny_models import FAMILIES
from transformers import BloomConfig, GptOssConfig, JambaConfig, LlamaConfig, MambaConfig

from thresher.errors import UserError
from thresher.models.layouts.choose import choose_layout


@pytest.mark.parametrize("family", FAMILIES)
def test_plain_transformers_share_their_prompts(family):
    layout, note = choose_layout("auto", FAMILIES[family], None, pad_id=0)
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
    layout, note = choose_layout("auto", family, None, pad_id=7)
    assert layout.name == "padded"
    assert layout.pad_id == 7
    assert note == f"layout padded, because {reason}"
    with pytest.raises(UserError, match=r"layout shared is not possible, because .*; use layout=auto or layout=padded"):
        choose_layout("shared", family, None, pad_id=0)


def test_a_wish_is_granted():
    assert choose_layout("packed", LlamaConfig(), None, 0)[0].name == "packed"
    assert choose_layout("padded", LlamaConfig(), None, 0) == (choose_layout("padded", LlamaConfig(), None, 0)[0], None)
    assert choose_layout("padded", LlamaConfig(), None, 0)[0].name == "padded"


def test_a_named_attention_implementation_is_honoured():
    layout, note = choose_layout("auto", LlamaConfig(), "eager", 0)
    assert layout.name == "padded"
    assert "attn_implementation is set to eager" in note
