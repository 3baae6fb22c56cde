"""`packed` and `shared` give the logps of `padded` for every family, and attention does not cross segments."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.support.segment_visibility import visibility
from tests.support.tiny_models import FAMILIES, MIXED, VOCAB, batch_of, pair_of, replace_side, tiny_model
from thresher.data.example import Example, ExampleBatch
from thresher.errors import UserError
from thresher.losses.pairs import ExampleLogps
from thresher.models.attention.flash import flash_attention, segment_calls
from thresher.models.attention.flex import block_mask, flex_segment_attention
from thresher.models.attention.interface import dense_attention
from thresher.models.attention.segments import Segment
from thresher.models.forward_check import check_logps
from thresher.models.layouts import Layout, PackedLayout, PaddedLayout
from thresher.models.loading.load import disable_dropout
from thresher.models.logps import PairModel

SHARED, PACKED, PADDED = PackedLayout(shares_prompt=True), PackedLayout(shares_prompt=False), PaddedLayout(pad_id=0)
PACKABLE = list(FAMILIES)


def pair_with_responses(prompt: int, chosen: list[int], rejected: list[int]) -> Example:
    """A pair with given response tokens and a fixed random prompt."""
    tokens = np.random.default_rng(9).integers(3, VOCAB, prompt).astype(np.int32)
    return Example.pair(tokens, np.array(chosen, dtype=np.int32), np.array(rejected, dtype=np.int32))


ODD = batch_of(
    pair_of(1, 1, 1, seed=4),  # one token each
    pair_of(1, 6, 1, seed=5),
    pair_with_responses(5, [7, 8, 9, 10], [7, 8]),  # one side a prefix of the other
    pair_with_responses(5, [11, 12], [13, 12, 11]),  # the same prompt again
    pair_of(40, 12, 30, seed=6),  # longer than all others together
)
# the first scored tokens are inside a response, so the last layer skips rows of the response too
LATE = batch_of(
    pair_of(3, 5, 6, seed=7, masks=([0, 0, 0, 1, 1], [0, 0, 0, 1, 0, 1])),
    pair_of(4, 3, 5, seed=8, masks=([1, 0, 1], [0, 0, 1, 1, 0])),
)


def score(
    model: torch.nn.Module, layout: Layout, batch: ExampleBatch, dtype: torch.dtype = torch.float32
) -> ExampleLogps:
    if layout.name == "padded":  # sdpa does not support soft-capped scores
        is_eager = model.config.model_type == "gemma2" or not model._supports_sdpa
        model.set_attn_implementation("eager" if is_eager else "sdpa")
    return PairModel.for_layout(model, dtype, layout).score(layout.collate(batch))


def values(sides: ExampleLogps) -> torch.Tensor:
    return torch.cat([sides.chosen.values, sides.rejected.values])


def gradient(model: torch.nn.Module, layout: Layout, batch: ExampleBatch) -> torch.Tensor:
    model.zero_grad()
    sides = score(model, layout, batch)
    (sides.chosen.values.sum() - 2 * sides.rejected.values.sum()).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.fixture(scope="module", params=PACKABLE)
def model(request):
    model = tiny_model(request.param).train()
    disable_dropout(model)
    return model


@pytest.mark.parametrize("layout", [SHARED, PACKED], ids=lambda layout: layout.name)
@pytest.mark.parametrize("batch", [MIXED, ODD, LATE], ids=["mixed", "odd", "late masks"])
def test_logps_and_gradients_equal_those_of_the_padded_layout(model, layout, batch):
    torch.testing.assert_close(
        values(score(model, layout, batch)), values(score(model, PADDED, batch)), atol=1e-5, rtol=1e-5
    )
    expected = gradient(model, PADDED, batch)
    found = gradient(model, layout, batch)
    assert (found - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize("layout", [SHARED, PACKED], ids=lambda layout: layout.name)
def test_bf16_compute_agrees_within_bf16_error(model, layout):
    padded = values(score(model, PADDED, MIXED, torch.bfloat16))
    exact = values(score(model, PADDED, MIXED))
    found = values(score(model, layout, MIXED, torch.bfloat16))
    # the error against padded bf16 is about that of padded bf16 against fp32
    assert (found - padded).abs().mean() <= 2 * (padded - exact).abs().mean() + 1e-3


def changed(pair: Example, side: str, at: int) -> Example:
    ids = getattr(pair, side).ids.copy()
    ids[at] = (ids[at] - 3 + 1) % (VOCAB - 3) + 3
    return replace_side(pair, ("chosen", "rejected").index(side), ids=ids)


@pytest.mark.parametrize("side", ["chosen", "rejected"])
def test_a_token_of_one_side_does_not_affect_the_other_side_or_another_pair_bitwise(model, side):
    pairs = list(MIXED.pairs)
    before = score(model, SHARED, MIXED)
    for at in range(len(pairs[1].chosen.ids if side == "chosen" else pairs[1].rejected.ids)):
        after = score(model, SHARED, batch_of(pairs[0], changed(pairs[1], side, at), pairs[2]))
        other = "rejected" if side == "chosen" else "chosen"
        assert torch.equal(getattr(after, other).values, getattr(before, other).values)
        changed_side, unchanged_side = getattr(after, side), getattr(before, side)
        starts = np.cumsum([0, *unchanged_side.lengths.tolist()])
        for neighbour in (0, 2):
            tokens = slice(starts[neighbour], starts[neighbour + 1])
            assert torch.equal(changed_side.values[tokens], unchanged_side.values[tokens])
        assert not torch.equal(changed_side.values, unchanged_side.values)


def test_layouts_of_a_small_pair():
    """Prompt 7 8, chosen 20 21 22, rejected 30 31: the last token of a response predicts nothing and is omitted."""
    pair = Example.pair(*(np.array(ids, dtype=np.int32) for ids in ([7, 8], [20, 21, 22], [30, 31])))
    shared = SHARED.collate(batch_of(pair))
    assert shared.model_inputs["input_ids"].tolist() == [[7, 8, 20, 21, 30]]
    assert shared.model_inputs["position_ids"].tolist() == [[0, 1, 2, 3, 2]]
    assert shared.segments == (Segment(0, 4), Segment(4, 5, 0, 2))
    assert shared.scored_rows.tolist() == [1, 2, 3, 1, 4]
    assert shared.targets.tolist() == [20, 21, 22, 30, 31]
    packed = PACKED.collate(batch_of(pair))
    assert packed.model_inputs["input_ids"].tolist() == [[7, 8, 20, 21, 7, 8, 30]]
    assert packed.model_inputs["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1, 2]]
    assert packed.segments == (Segment(0, 4), Segment(4, 7))
    assert packed.scored_rows.tolist() == [1, 2, 3, 5, 6]
    for inputs in (shared, packed):
        assert inputs.num_padding_tokens == 0
        assert inputs.num_useful_tokens == 2 + 3 + 2 + 2  # both full sequences, in every layout
        assert inputs.num_shared_tokens == 9 - inputs.model_inputs["input_ids"].numel()


def test_an_empty_prompt_is_rejected_with_its_pair_id():
    with pytest.raises(UserError, match="pair 0 has an empty prompt"):
        SHARED.collate(batch_of(pair_of(0, 2, 2)))


SEGMENTS = (Segment(0, 5), Segment(5, 9, 0, 3), Segment(9, 10), Segment(10, 17, 9, 10))


def random_heads(rows: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    return torch.randn(1, 4, rows, 8), torch.randn(1, 2, rows, 8), torch.randn(1, 2, rows, 8)


def flash(query, key, value, segments, scale, sinks=None):
    return flash_attention(query, key, value, segment_calls(segments, key.shape[2], query.device), scale, sinks)


# scores of about 1 to 3: one sink hardly matters, one takes most of the softmax
SINKS = torch.tensor([-3.0, 0.5, 2.0, 6.0])


@pytest.mark.parametrize("sinks", [None, SINKS], ids=["plain", "sinks"])
def test_flash_over_segments_equals_dense_attention_forward_and_backward(sinks):
    weights = torch.randn(1, 4, 17, 8)
    results = []
    for attend in (dense_attention, flash):
        leaves = [part.requires_grad_() for part in random_heads(17)]
        leaves += [] if sinks is None else [sinks.clone().requires_grad_()]
        out = attend(*leaves[:3], SEGMENTS, 0.3, sinks=None if sinks is None else leaves[3])
        (out * weights).sum().backward()
        results.append([out.detach(), *(part.grad for part in leaves)])
    for dense, joined in zip(*results, strict=True):
        torch.testing.assert_close(joined, dense, atol=1e-5, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("sinks", [None, SINKS], ids=["plain", "sinks"])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (3, None), (None, 1.5), (3, 1.5)])
def test_flex_attention_equals_dense_attention(window, softcap, sinks):
    """The GPU path; its forward runs on the CPU, its backward needs a GPU."""
    heads = random_heads(17)
    mask = block_mask(SEGMENTS, 17, window, torch.device("cpu"))
    found = flex_segment_attention(*heads, mask, 0.3, softcap, sinks=sinks)
    expected = dense_attention(*heads, SEGMENTS, 0.3, softcap=softcap, window=window, sinks=sinks)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


KEPT = (Segment(3, 5, 0, 3), Segment(5, 9, 0, 3), Segment(10, 17, 9, 10))
KEPT_ROWS = [3, 4, *range(5, 9), *range(10, 17)]


def test_kept_rows_attend_to_the_same_rows_as_before():
    """Kept rows of a last layer: rows 3-4 of the first segment, all of the second and of the fourth."""
    for window in (None, 3):
        assert torch.equal(visibility(KEPT, 17, window), visibility(SEGMENTS, 17, window)[KEPT_ROWS])
    query, key, value = random_heads(17)
    expected = dense_attention(query, key, value, SEGMENTS, 0.3)[:, :, KEPT_ROWS]
    query = query[:, :, KEPT_ROWS]
    torch.testing.assert_close(dense_attention(query, key, value, KEPT, 0.3), expected)
    found = flash(query, key, value, KEPT, 0.3)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("segment", [Segment(0, 5), Segment(5, 9, 0, 3), Segment(10, 17, 9, 10)], ids=str)
def test_the_tail_of_a_segment_attends_to_the_same_rows(segment):
    full = visibility((segment,), 17)
    for first in range(segment.start, segment.stop):
        for stop in range(first + 1, segment.stop + 1):
            tail = segment.tail(first, stop)
            assert tail.start <= first
            assert tail.stop == stop
            kept = slice(tail.start - segment.start, stop - segment.start)
            assert torch.equal(visibility((tail,), 17), full[kept]), (first, stop)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("window", [None, 3])
def test_flex_attention_of_kept_rows_equals_dense_attention(window):
    query, key, value = random_heads(17)
    query = query[:, :, KEPT_ROWS]
    found = flex_segment_attention(query, key, value, block_mask(KEPT, 17, window, torch.device("cpu")), 0.3, None)
    expected = dense_attention(query, key, value, KEPT, 0.3, window=window)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


SKIPS_ROWS = ["llama", "llama_stray_window", "mistral", "qwen2", "qwen2_windowed", "qwen3"]


@pytest.mark.parametrize("family", PACKABLE)
def test_the_last_layer_skips_unscored_rows_if_the_family_supports_it(family):
    model = tiny_model(family).eval()
    disable_dropout(model)
    pair_model = PairModel.for_layout(model, torch.float32, SHARED)
    assert pair_model.skips_unscored_rows == (family in SKIPS_ROWS)
    rows: list[int] = []

    def count(_module: object, _inputs: object, output: torch.Tensor | tuple[torch.Tensor, ...]) -> None:
        rows.append((output[0] if isinstance(output, tuple) else output).shape[-2])

    for layer in pair_model.backbone.layers:
        layer.register_forward_hook(count)
    inputs = SHARED.collate(ODD)
    pair_model.score(inputs)
    num_rows, kept = inputs.model_inputs["input_ids"].numel(), len(inputs.kept.rows)
    assert kept < 0.7 * num_rows
    *earlier, last = rows
    assert set(earlier) == {num_rows}
    assert last == (kept if family in SKIPS_ROWS else num_rows)


def test_the_mask_oracle_of_a_small_row():
    """Rows 0-1 are a prompt, 2 its chosen, 3-4 its rejected response; a window of 2 reaches one row back."""
    segments = (Segment(0, 3), Segment(3, 5, 0, 2))
    assert visibility(segments, 5).int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 0, 1, 0],
        [1, 1, 0, 1, 1],
    ]
    assert visibility(segments, 5, window=2).int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 1, 1, 0, 0],
        [0, 1, 0, 1, 0],
        [0, 0, 0, 1, 1],
    ]


def attention_with_full_mask(query, key, value, segments, scale, softcap=None, window=None, sinks=None):
    """softmax(capped scores + mask, sink) @ value over the full row, with keys repeated, in double precision."""
    query, key, value = (part.double() for part in (query, key, value))
    groups = query.shape[1] // key.shape[1]
    scores = torch.einsum("bhqd,bhkd->bhqk", query, key.repeat_interleave(groups, dim=1)) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    weights = scores.masked_fill(~visibility(segments, key.shape[2], window), -torch.inf).exp()
    of_sinks = 0 if sinks is None else sinks.double().exp()[None, :, None, None]
    weights = weights / (weights.sum(-1, keepdim=True) + of_sinks)
    return torch.einsum("bhqk,bhkd->bhqd", weights, value.repeat_interleave(groups, dim=1))


@pytest.mark.parametrize("value_dim", [8, 5])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (1, None), (3, None), (None, 1.5), (3, 1.5)])
@pytest.mark.parametrize("sinks", [None, SINKS], ids=["plain", "sinks"])
@pytest.mark.parametrize(("segments", "rows"), [(SEGMENTS, [*range(17)]), (KEPT, KEPT_ROWS)], ids=["all", "kept"])
def test_dense_attention_by_segments_equals_the_full_mask_forward_and_backward(
    segments, rows, sinks, window, softcap, kv_heads, value_dim
):
    generator = torch.Generator().manual_seed(7)
    shapes = ((4, len(rows), 8), (kv_heads, 17, 8), (kv_heads, 17, value_dim), (4, len(rows), value_dim))
    *heads, weights = (torch.randn(1, *shape, generator=generator) for shape in shapes)
    results = []
    for attend in (attention_with_full_mask, dense_attention):
        leaves = [part.clone().requires_grad_() for part in (*heads, *([] if sinks is None else [sinks]))]
        own_sinks = None if sinks is None else leaves[3]
        out = attend(*leaves[:3], segments, 0.3, softcap=softcap, window=window, sinks=own_sinks)
        (out * weights).sum().backward()
        results.append([out.detach().float(), *(leaf.grad for leaf in leaves)])
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_attention_may_leave_out_the_first_and_last_rows():
    """As in the last layer, where only segments with scored tokens are computed."""
    query, key, value = random_heads(17)
    segments = (Segment(4, 9),)
    expected = dense_attention(query[:, :, 4:9], key[:, :, 4:9], value[:, :, 4:9], (Segment(0, 5),), 0.3)
    torch.testing.assert_close(dense_attention(query[:, :, 4:9], key, value, segments, 0.3), expected)
    found = flash(query[:, :, 4:9], key, value, segments, 0.3)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_dense_attention_keeps_double_precision():
    heads = [part.double() for part in random_heads(17)]
    expected = attention_with_full_mask(*heads, SEGMENTS, 0.3, softcap=1.5, window=3, sinks=SINKS.double())
    found = dense_attention(*heads, SEGMENTS, 0.3, softcap=1.5, window=3, sinks=SINKS.double())
    torch.testing.assert_close(found, expected, atol=1e-13, rtol=1e-13)


def test_dense_attention_saves_no_matrix_of_the_full_row():
    """64 segments of 16 rows: no tensor saved for backward is as large as a head's 1,024 x 1,024 scores."""
    segments = tuple(Segment(start, start + 16) for start in range(0, 1024, 16))
    heads = [part.requires_grad_() for part in random_heads(1024)]
    sizes: list[int] = []

    def keep(saved: torch.Tensor) -> torch.Tensor:
        sizes.append(saved.numel())
        return saved

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
        dense_attention(*heads, segments, 0.3, softcap=1.5)
    assert 0 < max(sizes) <= max(part.numel() for part in heads)


def test_the_start_up_check_names_the_first_divergent_layer():
    model = tiny_model("granite").eval()
    pair_model = PairModel.for_layout(model, torch.float32, SHARED)
    check_logps(pair_model, SHARED, MIXED)
    calls = []

    def corrupt_packed_rows(_layer: object, _args: object, kwargs: dict, output: torch.Tensor) -> torch.Tensor | None:
        calls.append(kwargs.get("pair_visibility"))
        return None if kwargs.get("pair_visibility") is None else output.roll(1, -1)

    model.model.layers[1].register_forward_hook(corrupt_packed_rows, with_kwargs=True)
    with pytest.raises(
        UserError, match=r"layout `shared` differ .*family `granite`, first divergence at layer 1\); use layout"
    ):
        check_logps(pair_model, SHARED, MIXED)
    assert calls[0] is not None


def test_the_start_up_check_rejects_a_model_that_drops_the_segments():
    model = tiny_model("llama").eval()
    pair_model = PairModel.for_layout(model, torch.float32, SHARED)

    def drop_segments(_layer: object, args: tuple, kwargs: dict) -> tuple:
        return args, {name: value for name, value in kwargs.items() if name != "pair_visibility"}

    model.model.layers[0].register_forward_pre_hook(drop_segments, with_kwargs=True)
    with pytest.raises(UserError, match=r"layout `shared` does not work with model family `llama`.*use layout=padded"):
        check_logps(pair_model, SHARED, MIXED)


def test_the_start_up_check_rejects_logps_that_are_not_numbers():
    model = tiny_model("llama").eval()
    pair_model = PairModel.for_layout(model, torch.float32, SHARED)

    def divide_by_zero(_layer: object, _args: object, kwargs: dict, output: torch.Tensor) -> torch.Tensor | None:
        return None if kwargs.get("pair_visibility") is None else output * torch.nan

    model.model.layers[1].register_forward_hook(divide_by_zero, with_kwargs=True)
    with pytest.raises(UserError, match=r"layout `shared` differ .* by nan nats per token"):
        check_logps(pair_model, SHARED, MIXED)
