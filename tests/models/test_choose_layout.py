"""A model family gets the fastest layout that it supports, and a reason if it is not `shared`."""

from __future__ import annotations

import pytest
from transformers import (
    BloomConfig,
    Gemma2Config,
    JambaConfig,
    Llama4TextConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
)

from tests.support.tiny_models import FAMILIES, batch_of, pair_of
from thresher.errors import UserError
from thresher.models.layouts import choose_layout
from thresher.models.probe import what_packed_rows_lack


@pytest.mark.parametrize("family", FAMILIES)
def test_supported_families_get_the_shared_layout(family):
    layout, note = choose_layout("auto", [FAMILIES[family]], None, pad_id=0, probe=what_packed_rows_lack)
    assert (layout.name, note) == ("shared", None)


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        (MambaConfig(), "the model family mamba has linear_attention layers, which carry state from token to token"),
        (JambaConfig(), "the model family jamba has linear_attention layers, which carry state from token to token"),
        (BloomConfig(), "the model family bloom does not use transformers' attention interface"),
        (Llama4TextConfig(), "the model family llama4_text attends within chunks of a sequence"),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_unsupported_families_fall_back_to_padded_with_a_reason(family, reason):
    layout, note = choose_layout("auto", [family], None, pad_id=7)
    assert layout.name == "padded"
    assert layout.pad_id == 7
    assert note == f"using layout padded: {reason}"
    with pytest.raises(UserError, match=r"layout shared is not possible: .*; use layout=auto or layout=padded"):
        choose_layout("shared", [family], None, pad_id=0)


def test_a_requested_layout_is_used():
    assert choose_layout("packed", [LlamaConfig()], None, 0)[0].name == "packed"
    assert choose_layout("padded", [LlamaConfig()], None, 0)[0].name == "padded"


def test_the_reference_must_support_the_layout_too():
    layout, note = choose_layout("auto", [LlamaConfig(), BloomConfig()], None, 0)
    assert layout.name == "padded"
    assert "the model family bloom" in note


@pytest.mark.parametrize("requested", ["auto", "shared", "packed"])
def test_varlen_is_an_attention_of_packed_rows(requested):
    layout, note = choose_layout(requested, [LlamaConfig()], "varlen", 0)
    assert layout.needs_pair_attention
    assert layout.uses_varlen
    assert note is None
    inputs = layout.collate(batch_of(pair_of(3, 4, 5)))
    assert inputs.uses_varlen
    assert inputs.kept.visibility.uses_varlen


@pytest.mark.parametrize(
    ("requested", "family", "reason"),
    [
        ("padded", LlamaConfig(), "the layout is padded"),
        ("auto", BloomConfig(), "the model family bloom does not use transformers' attention interface"),
        ("auto", MistralConfig(sliding_window=64), "the model family mistral has a sliding window"),
        ("auto", Gemma2Config(sliding_window=None), "the model family gemma2 caps its attention scores"),
    ],
    ids=["padded", "bloom", "window", "soft cap"],
)
def test_varlen_is_refused_where_its_kernels_cannot_run(requested, family, reason):
    with pytest.raises(UserError, match=f"attn_implementation is set to varlen, but {reason}; remove"):
        choose_layout(requested, [family], "varlen", 0)


def test_a_configured_attention_implementation_selects_padded():
    layout, note = choose_layout("auto", [LlamaConfig()], "eager", 0)
    assert layout.name == "padded"
    assert "attn_implementation is set to eager" in note


@pytest.mark.parametrize("name", ["shared", "packed", "padded"])
def test_a_token_id_beyond_the_smallest_vocabulary_is_a_user_error(name):
    layout, _ = choose_layout(name, [LlamaConfig(vocab_size=96), LlamaConfig(vocab_size=50)], None, 0)
    for side in range(3):
        for outside in (50, -1):
            pairs = [pair_of(3, 4, 5), pair_of(3, 4, 5)]
            for pair in pairs:
                for ids in (pair.prompt_ids, pair.chosen.ids, pair.rejected.ids):
                    ids %= 50
            layout.collate(batch_of(*pairs))
            (pairs[1].prompt_ids, pairs[1].chosen.ids, pairs[1].rejected.ids)[side][-1] = outside
            with pytest.raises(UserError) as raised:
                layout.collate(batch_of(*pairs))
            assert str(raised.value) == (
                f"pair 1 contains the token id {outside}, but the model's vocabulary has 50 tokens; use the tokenizer "
                "that belongs to the model, and prepare the pairs again"
            )


def test_only_the_padded_layout_needs_a_pad_token():
    for name in ("auto", "shared", "packed"):
        assert choose_layout(name, [LlamaConfig()], None, None)[0].name in ("shared", "packed")
    with pytest.raises(
        UserError, match="layout padded needs a pad token, and the tokenizer has neither a pad token nor"
    ):
        choose_layout("padded", [LlamaConfig()], None, None)
