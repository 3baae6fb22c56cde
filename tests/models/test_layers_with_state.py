"""Layers with state on packed rows give the logps and gradients of transformers' forward on separate sequences."""

from __future__ import annotations

import copy
import inspect
import sys

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from tests.support.bound_kernels import KERNELS, bind_kernel
from tests.support.probed_families import default_config
from tests.support.stateful_models import STATEFUL
from tests.support.tiny_models import VOCAB, batch_of, pair_of
from thresher.data.example import Example, ExampleBatch, Response
from thresher.engines.native.check import check_axes
from thresher.engines.native.declaration import FSDP2Settings
from thresher.errors import UserError
from thresher.losses.pairs import ExampleLogps
from thresher.models import branching_state
from thresher.models.forward_check import check_logps
from thresher.models.layouts import PackedLayout, PaddedLayout, choose_layout, pad_to_multiple
from thresher.models.loading.adapters import LoraSettings, attach_lora
from thresher.models.loading.load import disable_dropout
from thresher.models.logps import PairModel, original_forward
from thresher.models.optimizations.recompute import recompute_activations
from thresher.models.pipeline_chunk import check_accepts_hidden_states

SHARED, PACKED, PADDED = PackedLayout(shares_prompt=True), PackedLayout(shares_prompt=False), PaddedLayout(pad_id=0)
LAYOUTS = pytest.mark.parametrize("layout", [SHARED, PACKED], ids=lambda layout: layout.name)


def example_of(prompt: int, *responses: int, seed: int) -> Example:
    """An example of random tokens with any number of responses."""
    rng = np.random.default_rng(seed)
    ids = [rng.integers(3, VOCAB, length).astype(np.int32) for length in (prompt, *responses)]
    return Example(ids[0], tuple(Response(each) for each in ids[1:]))


# one-token prompts and responses (of which no row is computed), prompts shorter than a convolution, and sequences
# longer than a chunk of a scan (16 and 64 rows)
PAIRS = batch_of(
    pair_of(1, 4, 2, seed=1),
    pair_of(7, 3, 9, seed=2),
    pair_of(2, 1, 5, seed=3),
    pair_of(3, 5, 1, seed=4),
    pair_of(70, 1, 33, seed=5),
    pair_of(2, 1, 1, seed=6),
    pair_of(40, 65, 1, seed=7),
)
UNEQUAL = batch_of(
    example_of(9, 5, 12, seed=11),
    example_of(66, 7, 1, 20, 2, seed=12),
    example_of(4, 6, seed=13),
    example_of(3, 1, seed=14),
)
LISTS = batch_of(
    example_of(9, 5, 1, 12, 3, seed=8), example_of(66, 7, 20, 2, 31, seed=9), example_of(1, 1, 2, 6, 1, seed=10)
)


@pytest.fixture(scope="module", params=STATEFUL)
def family(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def model(family):
    return tiny_stateful(family)


def tiny_stateful(family: str) -> torch.nn.Module:
    """A model whose states decay slowly, so that a prompt reaches the end of its responses.

    Larger weights would amplify the rounding of fp32.
    """
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(STATEFUL[family]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0.0, 0.1)
            elif name.endswith("A_log"):
                parameter.uniform_(-5.0, -2.0)
    disable_dropout(model)
    return model.train()


def logps_of_sequences(model: torch.nn.Module, batch: ExampleBatch) -> torch.Tensor:
    """Of transformers' own forward, one sequence at a time."""
    logps = []
    for prompt, response in batch.sequences():
        ids = torch.from_numpy(np.concatenate([prompt, response.ids]).astype(np.int64))
        with original_forward(model):
            logits = model(input_ids=ids[None], use_cache=False).logits[0]
        of_response = logits[len(prompt) - 1 : -1].log_softmax(-1)
        logps.append(of_response.gather(1, ids[len(prompt) :, None]).squeeze(1))
    return torch.cat(logps)


def score(model: torch.nn.Module, layout: PackedLayout, batch: ExampleBatch) -> ExampleLogps:
    return PairModel.for_layout(model, torch.float32, layout).score(layout.collate(batch))


def logps_of_layout(model: torch.nn.Module, layout: PackedLayout, batch: ExampleBatch) -> torch.Tensor:
    return torch.cat([side.values for side in score(model, layout, batch).sides])


def gradients(model: torch.nn.Module, logps: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    (logps * torch.linspace(-1, 1, len(logps))).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def gradient(model: torch.nn.Module, logps: torch.Tensor) -> torch.Tensor:
    return torch.cat([each.flatten() for each in gradients(model, logps).values()])


@LAYOUTS
@pytest.mark.parametrize(
    "batch", [PAIRS, LISTS, UNEQUAL], ids=["two responses", "four responses", "one to four responses"]
)
def test_logps_and_gradients_equal_those_of_separate_sequences(model, layout, batch):
    expected, found = logps_of_sequences(model, batch), logps_of_layout(model, layout, batch)
    torch.testing.assert_close(found, expected, atol=5e-6, rtol=0)
    assert_same_gradients(gradients(model, found), gradients(model, expected))


def assert_same_gradients(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Of each parameter, so that a large one hides no small one."""
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() <= 3e-5 * gradient.norm(), name


@LAYOUTS
def test_bf16_compute_agrees_within_the_error_of_bf16(model, layout):
    with torch.no_grad():
        exact = logps_of_sequences(model, PAIRS)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            expected = logps_of_sequences(model, PAIRS)
        scored = PairModel.for_layout(model, torch.bfloat16, layout).score(layout.collate(PAIRS))
        found = torch.cat([side.values for side in scored.sides])
    assert (found - exact).abs().mean() <= 1.25 * (expected - exact).abs().mean()


def test_a_token_of_one_response_moves_no_other_response(model):
    pairs = list(LISTS.pairs)
    with torch.no_grad():
        before = score(model, SHARED, LISTS)
        for side in range(4):
            responses = list(pairs[1].responses)
            ids = responses[side].ids.copy()
            ids[0] = (ids[0] - 2) % (VOCAB - 3) + 3
            responses[side] = Response(ids)
            after = score(model, SHARED, batch_of(pairs[0], Example(pairs[1].prompt_ids, tuple(responses)), pairs[2]))
            for index, (one, other) in enumerate(zip(after.sides, before.sides, strict=True)):
                moved = (one.values - other.values).abs() > 0
                start = int(other.lengths[0]) if index == side else 0
                length = int(other.lengths[1]) if index == side else 0
                assert moved[start : start + length].all()
                moved[start : start + length] = False
                assert not moved.any()


def test_a_prompt_is_computed_once(model):
    rows = []
    handle = (
        model.get_decoder()
        .layers[0]
        .register_forward_hook(lambda _layer, inputs, _output: rows.append(inputs[0].shape[:2]))
    )
    with torch.no_grad():
        score(model, SHARED, LISTS)
    handle.remove()
    lengths = [(len(each.prompt_ids), [len(response.ids) - 1 for response in each.responses]) for each in LISTS.pairs]
    assert rows == [(1, sum(prompt + sum(responses) for prompt, responses in lengths))]


@pytest.mark.parametrize(
    ("family", "name"), [("qwen3_5_text", "torch_chunk_gated_delta_rule"), ("nemotron_h", "mamba2_chunk_scan")]
)
def test_a_long_sequence_does_not_pad_short_ones_to_its_length(monkeypatch, family, name):
    """Sequences of similar length share a call; padding at most doubles the rows, counted in chunks."""
    model = tiny_stateful(family)
    functions = vars(sys.modules[type(model).__module__])
    compute, shapes = inspect.unwrap(functions[name]), []

    def counting(inputs, *args, **rest):
        shapes.append(tuple(inputs.shape[:2]))
        return compute(inputs, *args, **rest)

    branched = branching_state._BRANCHED[name]
    monkeypatch.setitem(functions, name, branching_state._on_segments(counting, branched))
    uneven = batch_of(
        example_of(500, 3, 180, seed=1),
        *(example_of(5 + index, 4, 2, seed=index) for index in range(20)),
        example_of(150, 9, 2, 7, seed=2),
    )
    expected = logps_of_sequences(model, uneven)
    shapes.clear()
    torch.testing.assert_close(logps_of_layout(model, SHARED, uneven), expected, atol=5e-6, rtol=0)
    # both layers: the prompts of 500 and 150 tokens, the others, the long response with three others, the rest
    assert shapes[: len(shapes) // 2] == shapes[len(shapes) // 2 :]
    assert shapes[: len(shapes) // 2] == [(2, 500), (20, 24), (4, 179), (41, 8)]
    shapes.clear()
    logps_of_layout(model, SHARED, LISTS)
    assert len(shapes) == 4  # similar lengths: one call for prompts and one for responses, in two layers


@pytest.mark.parametrize("family", STATEFUL)
def test_the_shared_layout_is_chosen(family):
    layout, note = choose_layout("auto", [STATEFUL[family]], None, pad_id=0)
    assert (layout.name, note) == ("shared", None)


@LAYOUTS
@pytest.mark.parametrize("name", ["causal_conv1d_fn", "torch_chunk_gated_delta_rule", "mamba2_chunk_scan"])
def test_the_start_up_check_finds_state_that_leaks(monkeypatch, layout, name):
    """Each function in turn ignores the segments."""
    family = "nemotron_h" if name.startswith("mamba2") else "qwen3_5_text"
    model = tiny_stateful(family).eval()
    pair_model = PairModel.for_layout(model, torch.float32, layout)
    check_logps(pair_model, layout, PAIRS)
    functions = vars(sys.modules[type(model).__module__])
    original = functions[name].carries_one_state
    monkeypatch.setitem(functions, name, lambda *args, pair_visibility=None, **rest: original(*args, **rest))
    with pytest.raises(UserError, match=f"layout `{layout.name}` differ .*use layout=padded"):
        check_logps(pair_model, layout, PAIRS)


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("family", ["qwen3_next", "falcon_h1", "lfm2"])
def test_recomputation_changes_no_gradient(family, recompute):
    model = tiny_stateful(family)
    expected = gradient(model, logps_of_layout(model, SHARED, LISTS))
    recompute_activations(model, recompute)
    assert torch.equal(gradient(model, logps_of_layout(model, SHARED, LISTS)), expected)


def test_compiled_layers_leave_state_outside():
    """Traced only: what a compiler makes of the rest does not depend on state."""
    model = tiny_stateful("qwen3_5_text")
    expected = logps_of_layout(model, SHARED, LISTS)
    expected_gradient = gradient(model, expected)
    for layer in model.get_decoder().layers:
        layer.compile(backend="eager", dynamic=True)
    found = logps_of_layout(model, SHARED, LISTS)
    torch.testing.assert_close(found, expected, atol=5e-6, rtol=0)
    assert (gradient(model, found) - expected_gradient).norm() <= 1e-5 * expected_gradient.norm()


@pytest.mark.parametrize(
    ("family", "target"),
    [("qwen3_5_text", ["all-linear"]), ("nemotron_h", ["in_proj", "q_proj", "down_proj"]), ("lfm2", ["all-linear"])],
)
def test_adapters_on_layers_with_state_train_alike(family, target):
    model = attach_lora(tiny_stateful(family), LoraSettings(4, None, target), dropout=0.0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0.0, 0.1)
    adapted = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert any(part in name for name in adapted for part in ("linear_attn.", "mixer.in_proj", ".conv.in_proj"))
    expected, found = logps_of_sequences(model, PAIRS), logps_of_layout(model, SHARED, PAIRS)
    torch.testing.assert_close(found, expected, atol=5e-6, rtol=0)
    expected_gradient = gradient(model, expected)
    assert (gradient(model, found) - expected_gradient).norm() <= 1e-5 * expected_gradient.norm()


def test_padding_of_the_row_changes_nothing():
    model = tiny_stateful("qwen3_5_text")
    pair_model = PairModel.for_layout(model, torch.float32, SHARED)
    inputs = SHARED.collate(PAIRS)
    with torch.no_grad():
        for one, other in zip(
            pair_model.score(pad_to_multiple(inputs, 16)).sides, pair_model.score(inputs).sides, strict=True
        ):
            torch.testing.assert_close(one.values, other.values, atol=5e-6, rtol=0)


@LAYOUTS
def test_sequences_one_after_another_equal_padded_ones(monkeypatch, layout):
    """As with flash-linear-attention, which takes cumulative lengths; here a loop does."""
    model = tiny_stateful("qwen3_5_text")
    expected = logps_of_layout(model, layout, LISTS)
    functions = vars(sys.modules[type(model).__module__])
    padded = inspect.unwrap(functions["torch_chunk_gated_delta_rule"])
    counts = []

    def kernel(*mixed, g, beta, initial_state, output_final_state, cu_seqlens, use_qk_l2norm_in_kernel):
        assert use_qk_l2norm_in_kernel
        assert cu_seqlens.dtype == torch.int64
        lengths = cu_seqlens.diff().tolist()
        counts.append(len(lengths))
        parts = zip(*(each.split(lengths, dim=1) for each in (*mixed, g, beta)), strict=True)
        states = [None] * len(lengths) if initial_state is None else initial_state.split(1)
        outs, finals = zip(
            *(
                padded(
                    *part[:3],
                    g=part[3],
                    beta=part[4],
                    initial_state=state,
                    output_final_state=True,
                    use_qk_l2norm_in_kernel=True,
                )
                for part, state in zip(parts, states, strict=True)
            ),
            strict=True,
        )
        return torch.cat(outs, dim=1), torch.cat(finals) if output_final_state else None

    bind_kernel(monkeypatch, STATEFUL["qwen3_5_text"], "fla", "torch_chunk_gated_delta_rule", kernel)
    torch.testing.assert_close(logps_of_layout(model, layout, LISTS), expected, atol=5e-6, rtol=0)
    # two layers: prompts (or whole sequences), then responses of which a row is computed
    assert counts == ([3, 9] if layout.shares_prompt else [12]) * 2


def test_an_adapter_that_mamba_kernels_would_leave_out_is_refused():
    with pytest.raises(UserError, match=r"lora_target \['all-linear'\] is not possible: .*'out_proj' is incompatible"):
        attach_lora(tiny_stateful("nemotron_h"), LoraSettings(4, None, ["all-linear"]), dropout=0.0)


@pytest.mark.parametrize(
    ("family", "num_ranks", "fits"),
    [
        ("qwen3_5_text", 4, True),
        ("qwen3_5_text", 8, False),  # 4 value heads
        ("nemotron_h", 4, True),  # 2 groups, repeated
        ("nemotron_h", 3, False),
        ("zamba2", 2, True),
        ("zamba2", 3, False),  # 8 heads
        ("lfm2", 8, True),
        ("lfm2", 3, False),  # 32 channels
    ],
)
def test_context_parallelism_needs_equal_shares_of_a_layer_with_state(family, num_ranks, fits):
    config = STATEFUL[family] if family in STATEFUL else default_config(family)
    assert branching_state.splits_over(config, num_ranks) == fits


def test_context_parallelism_over_sizes_that_the_config_does_not_name_is_refused():
    assert branching_state.splits_over(LlamaConfig(), 2)
    assert not branching_state.splits_over(LlamaConfig(num_hidden_layers=1, layer_types=["linear_attention"]), 2)


def test_only_the_kernel_that_rejects_fp32_lowers_the_precision_of_the_start_up_check(monkeypatch):
    models = {family: tiny_stateful(family) for family in ("qwen3_5_text", "nemotron_h")}
    assert not any(map(branching_state.needs_half_precision, models.values()))
    for family, package, name in KERNELS[:2]:
        bind_kernel(monkeypatch, STATEFUL[family], package, name)
        branching_state.branch_states(models[family])
    assert [branching_state.needs_half_precision(model) for model in models.values()] == [True, False]


def test_a_kernel_that_refuses_its_inputs_is_reported_as_a_layout_that_does_not_work(monkeypatch):
    bind_kernel(monkeypatch, STATEFUL["qwen3_5_text"], "fla", "torch_chunk_gated_delta_rule")
    model = PairModel.for_layout(tiny_stateful("qwen3_5_text"), torch.float32, SHARED)
    with pytest.raises(
        UserError, match=r"does not work with model family `qwen3_5_text` \(Expected a tensor on a GPU\)"
    ):
        check_logps(model, SHARED, PAIRS)


def test_context_parallelism_that_does_not_fit_is_refused_before_the_start():
    config = copy.deepcopy(STATEFUL["qwen3_5_text"])
    config.num_attention_heads = config.num_key_value_heads = 8
    with pytest.raises(
        UserError, match="cp_size is 8, which does not divide the heads and channels of the layers with"
    ):
        check_axes(FSDP2Settings(cp_size=8), 8, "actor_train", config, SHARED)


@pytest.mark.parametrize("family", ["nemotron_h", "falcon_h1", "lfm2"])
def test_pipelines_of_decoders_that_stages_cannot_split_are_refused(family):
    with pytest.raises(UserError, match=r"pipeline stages .*; set pp_size to 1"):
        check_accepts_hidden_states(tiny_stateful(family))
