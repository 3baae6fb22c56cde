"""Models with attention sinks: packed rows against transformers' own attention on separate sequences."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.support.tiny_models import FAMILIES as CONFIGS
from tests.support.tiny_models import VOCAB, batch_of, pair_of, tiny_model
from thresher.data.example import Example, ExampleBatch, Response
from thresher.engines.native.check import check_axes
from thresher.engines.native.declaration import FSDP2Settings
from thresher.errors import UserError
from thresher.models.layouts import PackedLayout
from thresher.models.loading.load import disable_dropout
from thresher.models.logps import PairModel

FAMILIES = ["gpt_oss", "mimo_v2_flash"]
LAYOUTS = [PackedLayout(shares_prompt=True), PackedLayout(shares_prompt=False)]
LISTS = np.random.default_rng(3)


def example_of(prompt: int, *responses: int) -> Example:
    tokens = [LISTS.integers(3, VOCAB, length).astype(np.int32) for length in (prompt, *responses)]
    return Example(tokens[0], tuple(Response(ids) for ids in tokens[1:]))


# longer than the window of 6, inside the prompt and across its end
BATCHES = {
    "two responses": batch_of(pair_of(9, 7, 11, seed=1), pair_of(2, 3, 8, seed=2)),
    "four responses": batch_of(example_of(8, 7, 3, 12, 1), example_of(3, 5, 9, 2, 6)),
}


def own_logps(model: torch.nn.Module, batch: ExampleBatch) -> torch.Tensor:
    """Logps of all responses with eager attention, one sequence at a time, in the order of `batch.sequences()`."""
    model.set_attn_implementation("eager")
    logps = []
    for prompt, response in batch.sequences():
        ids = torch.from_numpy(np.concatenate([prompt, response.ids]).astype(np.int64))
        scores = model(input_ids=ids[None], use_cache=False).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        logps.append(scores.gather(1, ids[len(prompt) :, None]).squeeze(1))
    return torch.cat(logps)


def packed_logps(model: torch.nn.Module, layout: PackedLayout, batch: ExampleBatch) -> torch.Tensor:
    scores = PairModel.for_layout(model, torch.float32, layout).score(layout.collate(batch))
    return torch.cat([side.values for side in scores.sides])


def gradients(model: torch.nn.Module, logps: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    (logps * torch.linspace(-1, 2, len(logps))).sum().backward()
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


@pytest.fixture(params=FAMILIES)
def model(request):
    model = tiny_model(request.param)
    disable_dropout(model)
    return model


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_logps_and_gradients_equal_those_of_separate_sequences(model, layout, batch):
    expected = own_logps(model, batch)
    expected_gradients = gradients(model, expected)
    found = packed_logps(model, layout, batch)
    found_gradients = gradients(model, found)
    torch.testing.assert_close(found, expected, atol=5e-6, rtol=0)
    assert found_gradients.keys() == expected_gradients.keys()
    sinks = [name for name in found_gradients if name.endswith("sinks")]
    assert sinks
    assert all(found_gradients[name].abs().min() > 0 for name in sinks)
    total = torch.cat([each.flatten() for each in expected_gradients.values()]).norm()
    distance = torch.cat([(found_gradients[name] - each).flatten() for name, each in expected_gradients.items()]).norm()
    assert distance <= 1e-5 * total
    for name in sinks:
        assert (found_gradients[name] - expected_gradients[name]).norm() <= 1e-5 * expected_gradients[name].norm()


def test_the_sinks_take_a_part_of_the_softmax(model):
    batch = BATCHES["two responses"]
    with torch.no_grad():
        before = packed_logps(model, LAYOUTS[0], batch)
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter += 1
        assert (packed_logps(model, LAYOUTS[0], batch) - before).abs().max() > 0.01


def test_a_token_of_one_response_moves_no_other_bitwise(model):
    one, two = BATCHES["four responses"].pairs
    with torch.no_grad():
        layout = LAYOUTS[0]
        before = PairModel.for_layout(model, torch.float32, layout).score(layout.collate(batch_of(one, two)))
        for changed in range(4):
            responses = list(one.responses)
            ids = responses[changed].ids.copy()
            ids[0] = 3 if ids[0] != 3 else 4
            responses[changed] = responses[changed]._replace(ids=ids)
            after = PairModel.for_layout(model, torch.float32, layout).score(
                layout.collate(batch_of(Example(one.prompt_ids, tuple(responses)), two))
            )
            for side, (old, new) in enumerate(zip(before.sides, after.sides, strict=True)):
                length = len(ids) if side == changed else 0
                assert torch.equal(old.values[length:], new.values[length:])
                assert torch.equal(old.values[:length], new.values[:length]) == (length == 0)


@pytest.mark.parametrize(
    ("family", "reason"), [("gpt_oss", "has no tensor-parallel plan"), ("mimo_v2_flash", "does not split the experts")]
)
def test_tensor_parallel_shards_of_sinks_are_refused_before_the_start(family, reason):
    with pytest.raises(UserError, match=f"tp_size is 2, .*{reason}"):
        check_axes(FSDP2Settings(tp_size=2), 2, "actor_train", CONFIGS[family], LAYOUTS[0])
