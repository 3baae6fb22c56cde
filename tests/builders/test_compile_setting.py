"""`torch_compile: auto` compiles the layers of policy and reference on GPUs, where strategy and axes support it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.compared_runs import merge
from tests.support.tiny_models import tiny_model
from thresher.builders.checkpoints import changed_settings
from thresher.builders.engines import compilation
from thresher.config import parse_config
from thresher.errors import UserError
from thresher.models.layouts import PackedLayout
from thresher.models.logps import PairModel
from thresher.models.optimizations.compile import Compilation, compile_elementwise

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
LAYERS, FUNCTIONS = (Compilation(parts, is_optional=True) for parts in ("layers", "functions"))


def policy(**changes: Any) -> dict[str, Any]:
    return {"actor_train": {"num_workers": 4, **changes}}


def axes(**sizes: Any) -> dict[str, Any]:
    return policy(strategy_args={"strategy_config": sizes})


SELECTIVE = policy(training_args={"gradient_checkpointing": "selective"})


def compiled(values: dict[str, Any], device: torch.device, section: str = "actor_train") -> Compilation | None:
    config = parse_config(values)
    return compilation(config, device, getattr(config, section))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, LAYERS),
        (axes(dp_replicate=2), LAYERS),
        (axes(tp_size=2), FUNCTIONS),
        (policy(model_args={"lora_rank": 4}), LAYERS),
        (axes(tp_size=2, sequence_parallel=True), FUNCTIONS),
        (axes(pp_size=2), FUNCTIONS),
        (axes(cp_size=2), FUNCTIONS),
        (SELECTIVE, FUNCTIONS),
        (axes(pp_size=2, virtual_pp_size=2, pp_schedule="zero_bubble"), None),
        (policy(model_args={"moe_aux_loss_coef": 0.01}), None),
        (policy(strategy_args={"strategy_name": "deepspeed_train"}), None),
        (policy(strategy_args={"strategy_name": "megatron_train"}), None),
    ],
    ids=lambda value: str(value)[:60],
)
def test_auto_compiles_on_a_gpu_what_strategy_and_axes_support(values, expected):
    assert compiled(values, GPU) == expected
    assert compiled(values, CPU) is None
    # a reference whose operations round differently would not start at margin 0
    assert compiled(values, GPU, "reference") == expected


@pytest.mark.parametrize("device", [CPU, GPU], ids=str)
def test_an_explicit_setting_holds_on_every_device(device):
    never, always = (policy(training_args={"torch_compile": setting}) for setting in (False, True))
    assert compiled(never, device) is None
    assert compiled(always, device) == Compilation("layers")
    assert compiled(merge(always, axes(pp_size=2)), device) == Compilation("functions")


def test_auto_leaves_a_model_without_layers_or_without_known_functions():
    backbone = PairModel.for_layout(tiny_model("gemma2"), torch.float32, PackedLayout(shares_prompt=True)).backbone
    assert compile_elementwise(backbone) == 0
    FUNCTIONS.apply(backbone)
    with pytest.raises(UserError, match="compiles only norms and activations of Llama-like layers"):
        Compilation("functions").apply(backbone)
    layers, backbone.layers = backbone.layers, None
    LAYERS.apply(backbone)
    assert not any(layer._compiled_call_impl for layer in layers)


@pytest.mark.parametrize(("now", "num_changes"), [("auto", 0), (False, 0), (True, 1)])
def test_a_checkpoint_of_the_earlier_default_resumes_with_this_one(now, num_changes):
    stored = parse_config({"actor_train": {"training_args": {"torch_compile": False}}}).model_dump(mode="json")
    config = parse_config({"actor_train": {"training_args": {"torch_compile": now}}})
    assert len(changed_settings(stored, config)) == num_changes
