"""LoRA: a new adapter changes nothing, can be disabled exactly, and can be merged."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.tiny_models import MIXED, batch_of, tiny_model
from thresher.config.roles import TrainingArgs
from thresher.engines.accumulate import MicroBatch
from thresher.engines.native.build import infer_engine, train_engine
from thresher.errors import UserError
from thresher.losses.formulas import Sigmoid
from thresher.losses.objective import Objective
from thresher.losses.pairs import ExampleLogps
from thresher.models.layouts import PaddedLayout
from thresher.models.loading.adapters import LoraSettings, adapter_disabled, attach_lora, init_adapters, merge_adapter

LAYOUT = PaddedLayout(pad_id=0)
FAMILIES = ["llama", "gemma2", "phi3", "gpt_neox"]


def with_lora(family: str, *, dropout: float = 0.0) -> torch.nn.Module:
    return attach_lora(tiny_model(family), LoraSettings(4, None, ["all-linear"]), dropout=dropout)


def score(model: torch.nn.Module) -> ExampleLogps:
    return infer_engine(model, LAYOUT, torch.float32).score(MIXED)


@torch.no_grad()
def randomize_lora_b(model: torch.nn.Module) -> None:
    """Set lora_B to non-zero values, as training would."""
    torch.manual_seed(3)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.normal_(0.0, 0.1)


def assert_same(one: ExampleLogps, other: ExampleLogps) -> None:
    assert torch.equal(one.chosen.values, other.chosen.values)
    assert torch.equal(one.rejected.values, other.rejected.values)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_new_adapter_does_not_change_the_output(family):
    assert_same(score(with_lora(family)), score(tiny_model(family)))


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_new_adapter_on_embeddings_does_not_change_the_output(family):
    model = attach_lora(tiny_model(family), LoraSettings(4, None, ["embed_tokens", "q_proj"]), dropout=0.0)
    init_adapters(model, seed=1)
    assert_same(score(model), score(tiny_model(family)))
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert sum(bool(p.any()) for p in trainable.values()) == len(trainable) / 2  # or nothing would be learned


def test_the_initial_values_of_a_seed_and_a_name_never_change():
    """A run that is started again from its config must begin with the same adapters."""
    model = attach_lora(tiny_model("llama"), LoraSettings(2, None, ["q_proj"]), dropout=0.0)
    init_adapters(model, seed=7)
    values = model.get_parameter("base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight")
    torch.testing.assert_close(
        values[:, :2], torch.tensor([[0.095446, -0.122221], [0.160118, -0.007474]]), rtol=1e-4, atol=0
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_a_trained_model_with_its_adapter_disabled_equals_its_base_bit_for_bit(family):
    model = with_lora(family)
    randomize_lora_b(model)
    trained = score(model)
    with adapter_disabled(model):
        base = score(model)
    assert_same(base, score(tiny_model(family)))
    assert (trained.chosen.values - base.chosen.values).abs().max() > 1e-2
    assert_same(score(model), trained)  # the adapter is enabled again


@pytest.mark.parametrize("family", FAMILIES)
def test_a_merged_model_gives_the_logps_of_the_adapted_model(family):
    model = with_lora(family)
    randomize_lora_b(model)
    trained = score(model)
    merged = merge_adapter(model)
    assert not any("lora" in name for name, _ in merged.named_parameters())
    torch.testing.assert_close(score(merged).chosen.values, trained.chosen.values, atol=1e-5, rtol=0)


def test_a_tied_model_with_adapted_embeddings_is_saved_as_the_trained_model(tmp_path):
    model = attach_lora(tiny_model("qwen2"), LoraSettings(4, None, ["embed_tokens"]), dropout=0.0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(0.0, 0.3)
    trained = score(model)
    assert (trained.chosen.values - score(tiny_model("qwen2")).chosen.values).abs().max() > 1e-2
    merge_adapter(model).save_pretrained(tmp_path)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    torch.testing.assert_close(score(saved).chosen.values, trained.chosen.values, atol=1e-5, rtol=0)


def test_only_the_adapter_is_trainable_also_after_the_base_was_scored():
    policy = train_engine(with_lora("llama"), LAYOUT, torch.float32, TrainingArgs(learning_rate=0.1))
    assert policy.weights()
    assert all("lora_" in name for name in policy.weights())
    policy.score_base(MIXED)
    assert all(p.requires_grad == ("lora_" in name) for name, p in policy.model.named_parameters())


def test_adapter_dropout_is_active_in_training_and_not_in_scoring():
    model = with_lora("llama", dropout=0.5)
    randomize_lora_b(model)
    policy = train_engine(model, LAYOUT, torch.float32, TrainingArgs(learning_rate=0.1))
    inputs = LAYOUT.collate(MIXED)
    first, second = (policy.executor.model.score(inputs).chosen.values for _ in range(2))
    assert not torch.equal(first, second)
    assert_same(policy.score(MIXED), policy.score(MIXED))


class CoupledSigmoid(Sigmoid):
    """DPO with the two passes of a loss that couples all pairs of a step."""

    couples_pairs = True


def test_both_passes_of_a_coupled_loss_draw_the_same_dropout_masks():
    reference = infer_engine(tiny_model("llama", seed=1).double(), LAYOUT, torch.float64)
    batches = [batch_of(pair) for pair in MIXED.pairs]
    micro_batches = [MicroBatch(batch, reference.score(batch)) for batch in batches]
    gradients = []
    for loss in (Sigmoid(), CoupledSigmoid()):
        model = with_lora("llama", dropout=0.5)
        randomize_lora_b(model)
        policy = train_engine(model.double(), LAYOUT, torch.float64, TrainingArgs(learning_rate=0.1))
        torch.manual_seed(7)
        policy.accumulate(micro_batches, Objective(((loss, 1.0),)), num_pairs_in_step=len(batches))
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    independent, coupled = gradients
    assert independent.keys() == coupled.keys()
    for name, gradient in independent.items():
        torch.testing.assert_close(coupled[name], gradient, atol=1e-12, rtol=0, msg=name)


def test_alpha_is_twice_the_rank_by_default():
    assert with_lora("llama").peft_config["default"].lora_alpha == 8


def test_a_target_that_matches_nothing_is_rejected_with_the_linear_modules_listed():
    with pytest.raises(UserError) as caught:
        attach_lora(tiny_model("llama"), LoraSettings(4, None, ["qqq"]), dropout=0.0)
    assert str(caught.value) == (
        "lora_target ['qqq'] matches nothing in this model; its linear modules are down_proj, gate_proj, k_proj, "
        "lm_head, o_proj, q_proj, up_proj, v_proj"
    )


def test_one_target_that_matches_nothing_is_rejected_although_another_matches():
    with pytest.raises(UserError, match=r"lora_target \['q_prj'\] matches nothing in this model; its linear modules"):
        attach_lora(tiny_model("llama"), LoraSettings(4, None, ["q_prj", "v_proj"]), dropout=0.0)


EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]


@pytest.mark.parametrize(
    ("lora", "dropout", "message"),
    [
        (
            LoraSettings(2, None, ["all-linear", *EXPERTS]),
            0.1,
            "lora_dropout is 0.1, which experts.gate_up_proj cannot",
        ),
        (LoraSettings(2, None, EXPERTS, "pissa"), 0.0, "lora_init pissa cannot decompose experts.gate_up_proj"),
        (LoraSettings(2, None, ["all-linear", "embed_tokens"]), 0.0, "all-linear leaves embed_tokens as it is, or has"),
        (LoraSettings(2, None, ["experts.up_proj"]), 0.0, "lora_target .'experts.up_proj'. matches nothing"),
    ],
)
def test_experts_that_cannot_have_an_adapter_are_an_error(lora, dropout, message):
    with pytest.raises(UserError, match=message):
        attach_lora(tiny_model("qwen3_moe"), lora, dropout=dropout)


def test_an_adapter_on_experts_alone_leaves_the_rest():
    adapted = attach_lora(tiny_model("qwen3_moe"), LoraSettings(2, None, EXPERTS), dropout=0.0)
    trained = [name for name, parameter in adapted.named_parameters() if parameter.requires_grad]
    assert trained
    assert all(".experts." in name for name in trained)
