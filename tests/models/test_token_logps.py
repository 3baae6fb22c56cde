"""Logps equal log_softmax of the model's logits, for every family and independent of the other pairs in the batch."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, Llama4TextConfig

from tests.support.tiny_models import FAMILIES, GROUPED, MIXED, VOCAB, batch_of, pair_of, tiny_model
from thresher.data.example import Example
from thresher.errors import UserError
from thresher.losses.pairs import ExampleLogps, TokenStatistics
from thresher.models.forward_check import _layer_outputs, check_logps
from thresher.models.layouts import PaddedLayout, choose_layout
from thresher.models.lm_head import LogitTransform, logit_transform
from thresher.models.loading.load import disable_dropout
from thresher.models.logps import PairModel

LAYOUT = PaddedLayout(pad_id=0)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def model(family):
    """In training mode, as a policy is, with dropout disabled."""
    model = tiny_model(family).train()
    disable_dropout(model)
    return model


def score(model: torch.nn.Module, batch, **options) -> ExampleLogps:
    return PairModel.for_layout(model, torch.float32, LAYOUT).score(LAYOUT.collate(batch), **options)


@torch.no_grad()
def reference_logps(model: torch.nn.Module, prompt, response, mask) -> torch.Tensor:
    """The oracle: one sequence at a time, full logits, log_softmax, and the scored tokens."""
    ids = torch.tensor([[*prompt.tolist(), *response.tolist()]])
    logits = model.eval()(input_ids=ids, use_cache=False).logits[0].double()
    logps = [
        logits[len(prompt) + i - 1].log_softmax(-1)[token]
        for i, token in enumerate(response.tolist())
        if mask is None or mask[i]
    ]
    model.train()
    return torch.stack(logps).float()


def expected_sides(model: torch.nn.Module, pair: Example) -> tuple[torch.Tensor, torch.Tensor]:
    return (
        reference_logps(model, pair.prompt_ids, pair.chosen.ids, pair.chosen.mask),
        reference_logps(model, pair.prompt_ids, pair.rejected.ids, pair.rejected.mask),
    )


def test_token_logps_are_log_softmax_of_the_logits(model):
    scored = score(model, MIXED)
    expected = [expected_sides(model, pair) for pair in MIXED.pairs]
    for side, found in enumerate((scored.chosen, scored.rejected)):
        assert found.lengths.tolist() == [len(sides[side]) for sides in expected]
        torch.testing.assert_close(found.values, torch.cat([sides[side] for sides in expected]), atol=1e-5, rtol=0)
    spread = torch.cat([scored.chosen.values, scored.rejected.values]).std()
    assert spread > 0.1  # the logps differ between tokens


def test_a_pair_scores_the_same_alone_and_with_a_longer_one(model):
    alone, longer = pair_of(2, 3, 4, seed=5), pair_of(20, 30, 12, seed=6)
    by_itself = score(model, batch_of(alone))
    beside = score(model, batch_of(alone, longer))
    torch.testing.assert_close(beside.chosen.values[:3], by_itself.chosen.values, atol=1e-5, rtol=0)
    torch.testing.assert_close(beside.rejected.values[:4], by_itself.rejected.values, atol=1e-5, rtol=0)


def test_scores_in_training_mode_are_deterministic(model):
    assert model.training
    first, second = score(model, MIXED), score(model, MIXED)
    assert torch.equal(first.chosen.values, second.chosen.values)
    assert torch.equal(first.rejected.values, second.rejected.values)


def test_gradients_equal_those_of_the_logits(model):
    model.zero_grad()
    scored = score(model, MIXED)
    (scored.chosen.values.sum() - 2 * scored.rejected.values.sum()).backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    inputs = LAYOUT.collate(MIXED)
    logits = model(**inputs.model_inputs, use_cache=False).logits
    rows = logits.reshape(-1, logits.shape[-1])[inputs.scored_rows].float()
    logps = rows.log_softmax(-1).gather(1, inputs.targets[:, None]).squeeze(1)
    split = int(inputs.side_lengths[0].sum())
    (logps[:split].sum() - 2 * logps[split:].sum()).backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert found.keys() == expected.keys()
    scale = max(grad.abs().max().item() for grad in expected.values())
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, atol=1e-5 * scale, rtol=1e-4, msg=name)


def test_log_sum_squared_probs_is_the_log_of_the_sum_of_squared_probabilities(model):
    scored = score(model, MIXED, statistics=TokenStatistics(squared_probs=True))
    inputs = LAYOUT.collate(MIXED)
    with torch.no_grad():
        logits = model(**inputs.model_inputs, use_cache=False).logits
    probabilities = logits.reshape(-1, logits.shape[-1])[inputs.scored_rows].double().softmax(-1)
    expected = probabilities.square().sum(-1).log().float()
    found = torch.cat([scored.chosen.log_sum_squared_probs, scored.rejected.log_sum_squared_probs])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    assert not found.requires_grad


def test_entropy_is_that_of_the_distribution_at_every_scored_token(model):
    scored = score(model, MIXED, statistics=TokenStatistics(entropy=True))
    inputs = LAYOUT.collate(MIXED)
    with torch.no_grad():
        logits = model(**inputs.model_inputs, use_cache=False).logits
    rows = logits.reshape(-1, logits.shape[-1])[inputs.scored_rows].double()
    found = torch.cat([scored.chosen.entropy, scored.rejected.entropy])
    torch.testing.assert_close(found, torch.distributions.Categorical(logits=rows).entropy().float(), atol=1e-5, rtol=0)
    assert not found.requires_grad


def test_the_start_up_check_accepts_every_family(model):
    check_logps(PairModel.for_layout(model, torch.float32, LAYOUT), LAYOUT, MIXED)
    assert model.training


class LargestTensor(TorchDispatchMode):
    """Records the largest number of rows of a tensor whose last dimension is the vocabulary."""

    def __init__(self):
        super().__init__()
        self.rows = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.ndim >= 2 and leaf.shape[-1] == VOCAB:
                self.rows = max(self.rows, leaf.numel() // VOCAB)
        return result


@pytest.mark.parametrize("family", ["llama", "gemma2"], indirect=True)
def test_only_rows_that_predict_scored_tokens_reach_the_head(model):
    """8 scored rows of 2 x 84 positions; the transposed head weight has 32 rows."""
    batch = batch_of(pair_of(80, 4, 4, seed=7))
    with LargestTensor() as largest:
        scored = score(model, batch, statistics=TokenStatistics(squared_probs=True))
        (scored.chosen.values.sum() + scored.rejected.values.sum()).backward()
    assert 8 <= largest.rows <= 32
    model.zero_grad()


def test_soft_cap_and_scale_are_read_from_the_config_and_applied():
    """The other tests cover them only if these models have them."""
    assert logit_transform(FAMILIES["gemma2"]) == LogitTransform(1.0, 2.0)
    assert logit_transform(FAMILIES["granite"]) == LogitTransform(1 / 8, None)
    assert logit_transform(FAMILIES["cohere"]) == LogitTransform(0.25, None)
    logits = torch.tensor([4.0, -1.0])
    assert LogitTransform(0.5, 2.0)(logits).tolist() == pytest.approx([2 * 0.7615942, 2 * -0.2449187])


def test_the_bias_of_a_head_is_scaled_too():
    model = tiny_model("granite").eval()
    head = torch.nn.Linear(32, VOCAB, bias=True)
    torch.nn.init.normal_(head.bias, std=3.0)
    model.set_output_embeddings(head)
    scored = score(model, MIXED)
    torch.testing.assert_close(
        scored.chosen.values,
        torch.cat([expected_sides(model, pair)[0] for pair in MIXED.pairs]),
        atol=1e-5,
        rtol=0,
    )


def test_the_start_up_check_rejects_a_model_with_an_unknown_logit_transform():
    model = tiny_model("llama").eval()
    forward = model.forward

    def shifted(*args, **kwargs):
        output = forward(*args, **kwargs)
        output.logits = output.logits * 1.01
        return output

    model.forward = shifted
    with pytest.raises(
        UserError, match=r"layout `padded` differ from the model's original forward by .* \(model family `llama`"
    ):
        check_logps(PairModel.for_layout(model, torch.float32, LAYOUT), LAYOUT, MIXED)


def test_logps_stay_fp32_when_the_backbone_computes_in_bf16():
    model = tiny_model("llama")
    exact = PairModel.for_layout(model, torch.float32, LAYOUT).score(LAYOUT.collate(MIXED)).chosen.values
    mixed = PairModel.for_layout(model, torch.bfloat16, LAYOUT).score(LAYOUT.collate(MIXED)).chosen.values
    assert mixed.dtype == torch.float32
    assert 0 < (mixed - exact).abs().max() < 0.3


def test_the_check_compares_the_hidden_states_of_layers_that_return_more():
    class Layer(torch.nn.Module):
        def forward(self, hidden):
            return hidden + 1, None

    backbone = torch.nn.Module()
    backbone.layers = torch.nn.ModuleList([Layer()])
    with _layer_outputs(backbone) as outputs:
        backbone.layers[0](torch.zeros(1, 2, 3))
    assert [states.tolist() for states in outputs] == [[[1.0] * 3] * 2]


def test_llama_4_is_scored_as_by_its_own_forward():
    """Its decoder has another name than transformers expects, and its layers attend within chunks of 8 tokens."""
    torch.manual_seed(0)
    config = Llama4TextConfig(
        **GROUPED,
        head_dim=8,
        intermediate_size_mlp=48,
        num_local_experts=4,
        attention_chunk_size=8,
        layer_types=["chunked_attention", "full_attention"],
    )
    layout = choose_layout("auto", [config], None, pad_id=0)[0]
    model = PairModel.for_layout(AutoModelForCausalLM.from_config(config), torch.float32, layout)
    pairs = batch_of(pair_of(2, 3, 9, seed=1), pair_of(20, 5, 7, seed=2))
    check_logps(model, layout, pairs)
    model.score(layout.collate(pairs)).chosen.values.sum().backward()
    assert all(layer.self_attn.q_proj.weight.grad.norm() > 0 for layer in model.backbone.layers)
