"""Attention scores that are soft-capped, as in Gemma 2, are never computed by sdpa, which ignores the cap."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.gemma2.modeling_gemma2 import Gemma2PreTrainedModel

from tests.support.tiny_models import FAMILIES
from thresher.errors import UserError
from thresher.models.layouts import PackedLayout
from thresher.models.loading.load import load_model
from thresher.models.loading.load_sharded import build_without_weights
from thresher.models.logps import PairModel, original_forward

LOADERS = [load_model, build_without_weights]


@pytest.fixture
def gemma2(tmp_path, monkeypatch) -> Path:
    """A saved Gemma 2 that transformers would run with sdpa, as 5.19 does."""
    AutoModelForCausalLM.from_config(FAMILIES["gemma2"]).save_pretrained(tmp_path)
    monkeypatch.setattr(Gemma2PreTrainedModel, "_supports_sdpa", True)
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config._attn_implementation == "sdpa"
    return tmp_path


@pytest.mark.parametrize("load", LOADERS)
def test_a_soft_capped_model_runs_with_eager_attention(gemma2, load):
    assert load(str(gemma2), dtype=torch.float32).config._attn_implementation == "eager"


@pytest.mark.parametrize("load", LOADERS)
def test_sdpa_is_rejected_for_a_soft_capped_model(gemma2, load):
    with pytest.raises(UserError, match=r"sdpa ignores the soft cap on attention scores .* gemma2; remove .* eager"):
        load(str(gemma2), dtype=torch.float32, attn_implementation="sdpa")


def test_the_original_forward_of_a_soft_capped_model_is_eager(gemma2):
    model = load_model(str(gemma2))
    PairModel.for_layout(model, torch.float32, PackedLayout(shares_prompt=True))
    with original_forward(model):
        assert model.config._attn_implementation == "eager"
