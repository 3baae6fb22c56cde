"""Experts compute in the compute precision and routers in fp32, in eager and in compiled layers."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.support.stateful_models import STATEFUL
from tests.support.tiny_models import EXPERT_FAMILIES, FAMILIES, MIXED
from thresher.models.layouts import PackedLayout, PaddedLayout
from thresher.models.loading.load import without_dropout
from thresher.models.loading.trained import narrow_frozen_matrices
from thresher.models.logps import PairModel
from thresher.models.optimizations.compile import compile_layers
from thresher.models.pipeline_chunk import decoder_of
from thresher.models.router import routers

CONFIGS = {family: {**FAMILIES, **STATEFUL}[family] for family in EXPERT_FAMILIES}
SHARED = PackedLayout(shares_prompt=True)


def model_of(family: str, **changes: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    config = copy.deepcopy(CONFIGS[family])
    config.initializer_range = 0.1
    for name, value in changes.items():
        setattr(config, name, value)
    model = without_dropout(AutoModelForCausalLM.from_config(config))
    # some routers start at 0
    for router in routers(model):
        torch.nn.init.normal_(router.weight, std=0.3)
    return model


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[torch.dtype, torch.dtype]]]:
    """The dtypes of the factors of each grouped product."""
    seen: list[tuple[torch.dtype, torch.dtype]] = []
    original = F.grouped_mm

    def grouped_mm(rows: torch.Tensor, matrices: torch.Tensor, **settings: Any) -> torch.Tensor:
        seen.append((rows.dtype, matrices.dtype))
        return original(rows, matrices, **settings)

    monkeypatch.setattr(F, "grouped_mm", grouped_mm)
    return seen


def logps_of(model: PreTrainedModel, dtype: torch.dtype, layout: Any = SHARED) -> torch.Tensor:
    pairs = PairModel.for_layout(model, dtype, layout)
    return torch.cat([side.values for side in pairs.score(layout.collate(MIXED)).sides])


@pytest.mark.parametrize(
    ("family", "compiles"), [*((family, False) for family in CONFIGS), ("qwen3_moe", True), ("gpt_oss", True)]
)
def test_experts_compute_in_bf16_and_routers_in_fp32(family, compiles, products):
    model = model_of(family)
    logits: list[torch.dtype] = []
    for router in routers(model):
        router.register_forward_hook(lambda _router, _inputs, outputs: logits.append(_first(outputs).dtype))
    if compiles:
        compile_layers(decoder_of(model))
    logps_of(model, torch.bfloat16).sum().backward()
    assert products
    assert set(products) == {(torch.bfloat16, torch.bfloat16)}
    assert set(logits) == {torch.float32}
    experts = [weight for name, weight in model.named_parameters() if ".experts." in name and weight.ndim == 3]
    assert experts
    assert all(weight.dtype == weight.grad.dtype == torch.float32 and weight.grad.any() for weight in experts)


def _first(outputs: Any) -> torch.Tensor:
    return outputs if isinstance(outputs, torch.Tensor) else outputs[0]


@pytest.mark.parametrize("layout", [SHARED, PaddedLayout(pad_id=0)], ids=["shared", "padded"])
@pytest.mark.parametrize("family", CONFIGS)
def test_bf16_is_as_near_to_fp32_as_rounding_allows_and_fp32_is_transformers(family, layout, monkeypatch):
    exact = logps_of(model_of(family), torch.float32, layout)
    rounded = logps_of(model_of(family), torch.bfloat16, layout)
    assert 0 < (rounded - exact).abs().mean() < 0.05
    with monkeypatch.context() as patch:
        patch.setattr("thresher.models.logps.use_compute_precision", lambda _: None)
        assert torch.equal(logps_of(model_of(family), torch.float32, layout), exact)


def test_matrices_that_a_grouped_product_cannot_read_in_bf16_stay_in_fp32(products):
    """Rows of 12 numbers are 24 bytes in bf16, not a multiple of 16."""
    logps = logps_of(model_of("qwen3_moe", moe_intermediate_size=12), torch.bfloat16)
    assert torch.isfinite(logps).all()
    assert set(products) == {(torch.float32, torch.float32)}


def test_frozen_routers_keep_their_precision():
    model = model_of("qwen3_moe")
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    narrow_frozen_matrices(decoder_of(model), torch.bfloat16)
    assert {router.weight.dtype for router in routers(model)} == {torch.float32}
    assert decoder_of(model).layers[0].self_attn.q_proj.weight.dtype == torch.bfloat16
