"""Memory-efficient norms and MLPs against the original layers: values, gradients, saved tensors."""

from __future__ import annotations

import pytest
import torch

from tests.support.tiny_models import tiny_model
from thresher.models.optimizations.llama_layers import original_forwards, use_memory_efficient_layers

FAMILIES = ["llama", "mistral", "qwen2", "qwen3"]
IDS = torch.arange(3, 43).reshape(2, 20)


def _forward_and_gradients(model, autocast: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        hidden = model.model(input_ids=IDS, use_cache=False).last_hidden_state
    factors = torch.linspace(-1, 1, hidden.numel()).view_as(hidden)
    (hidden * factors).sum().backward()
    return hidden.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("autocast", "tolerance"), [(False, 1e-6), (True, 3e-2)], ids=["fp32", "bf16"])
def test_values_and_gradients_equal_those_of_the_original_layers(family, autocast, tolerance):
    model = tiny_model(family).train()
    use_memory_efficient_layers(model.model)
    found, found_gradients = _forward_and_gradients(model, autocast)
    with original_forwards(model):
        expected, expected_gradients = _forward_and_gradients(model, autocast)
    assert (found - expected).norm() <= tolerance * expected.norm()
    assert found_gradients.keys() == expected_gradients.keys()
    norm = torch.cat([grad.flatten() for grad in expected_gradients.values()]).norm()
    for name, grad in expected_gradients.items():
        assert (found_gradients[name] - grad).norm() <= tolerance * norm, name


def test_a_norm_of_bf16_rows_rounds_once():
    model = tiny_model("llama").to(torch.bfloat16)
    use_memory_efficient_layers(model.model)
    norm = model.model.layers[0].input_layernorm
    torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    rows = torch.randn(64, norm.weight.numel(), dtype=torch.bfloat16)
    found = norm(rows)
    assert found.dtype is torch.bfloat16
    wide = rows.double()
    expected = norm.weight.double() * wide / (wide.square().mean(-1, keepdim=True) + norm.variance_epsilon).sqrt()
    # one rounding to 8 significant bits is within 2**-8; the rest is fp32
    assert ((found.double() - expected).abs() <= (2**-8 + 1e-6) * expected.abs()).all()


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "bf16"])
def test_less_memory_is_saved_for_the_backward(autocast):
    model = tiny_model("llama").train()
    saved_bytes = []
    for memory_efficient in (False, True):
        if memory_efficient:
            use_memory_efficient_layers(model.model)
        saved: dict[int, torch.Tensor] = {}  # by storage: a tensor saved twice counts once

        def save(tensor: torch.Tensor, saved: dict[int, torch.Tensor] = saved) -> torch.Tensor:
            saved[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
            _forward_and_gradients(model, autocast)
        parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
        saved_bytes.append(sum(t.untyped_storage().nbytes() for ptr, t in saved.items() if ptr not in parameters))
    assert saved_bytes[1] < 0.85 * saved_bytes[0]


def test_other_families_and_other_activations_are_unchanged():
    for family in ("gemma2", "olmo2", "gpt_neox"):
        model = tiny_model(family)
        use_memory_efficient_layers(model.base_model)
        assert not any("forward" in vars(module) for module in model.modules())
    model = tiny_model("llama")
    model.config.hidden_act = "gelu"
    use_memory_efficient_layers(model.model)
    assert "forward" not in vars(model.model.layers[0].mlp)
    assert "forward" in vars(model.model.layers[0].input_layernorm)


def test_a_forward_patched_by_another_library_is_unchanged():
    model = tiny_model("llama")
    norm = model.model.layers[0].input_layernorm
    norm.forward = lambda hidden: hidden
    use_memory_efficient_layers(model.model)
    with original_forwards(model):
        assert norm.forward(1) == 1
    assert norm.forward(1) == 1
