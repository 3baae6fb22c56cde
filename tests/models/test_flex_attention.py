"""FlexAttention without a GPU: its block lists, its compiled variants, and the start-up check that runs it compiled."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from functools import partial
from itertools import product

import numpy as np
import pytest
import torch
import torch.nn.attention.flex_attention as torch_flex
from torch._dynamo.utils import counters
from torch.nn.attention.flex_attention import create_block_mask

from tests.support.segment_visibility import visibility
from tests.support.tiny_models import batch_of, pair_of, tiny_model
from thresher.data.example import ExampleBatch
from thresher.errors import UserError
from thresher.models.attention.flex import (
    MAX_COMPILED_VARIANTS,
    BlockLists,
    block_lists,
    block_mask,
    compile_flex_attention,
    flex_segment_attention,
    visible_keys,
)
from thresher.models.attention.interface import KERNELS, cached_mask, dense_attention
from thresher.models.attention.segments import PackedAttention, Segment
from thresher.models.forward_check import check_logps
from thresher.models.layouts import PackedLayout, pad_to_multiple
from thresher.models.logps import PairModel
from thresher.models.optimizations.compile import compile_layers

SHARED = PackedLayout(shares_prompt=True)
CPU = torch.device("cpu")
LIST_NAMES = [f"{side}_{what}" for side in ("kv", "full_kv", "q", "full_q") for what in ("num_blocks", "indices")]


def random_batch(rng: np.random.Generator, longest: int) -> ExampleBatch:
    """One to six pairs, some with a random part of their tokens scored, also none of a side."""
    pairs = []
    for seed in range(rng.integers(1, 7)):
        prompt, chosen, rejected = (int(length) for length in rng.integers(1, longest, 3))
        masks = tuple(rng.random(length) < rng.choice([0, 0.1, 1]) for length in (chosen, rejected))
        pairs.append(pair_of(prompt, chosen, rejected, seed=seed, masks=masks if rng.random() < 0.5 else None))
    return batch_of(*pairs)


def random_packs(seed: int, longest: int):
    """Yield segments and the number of keys: rows of a layout, and those that its last layer keeps."""
    rng = np.random.default_rng(seed)
    inputs = PackedLayout(shares_prompt=bool(rng.integers(2))).collate(random_batch(rng, longest))
    inputs = pad_to_multiple(inputs, int(rng.integers(1, 9)))
    num_keys = inputs.model_inputs["input_ids"].shape[1]
    for segments in (inputs.segments, inputs.kept.visibility.segments):
        if segments:
            yield segments, num_keys, None if rng.random() < 0.5 else int(rng.integers(1, longest))


def listed_blocks(lists: BlockLists) -> tuple[np.ndarray, np.ndarray]:
    """The blocks that are listed as partial and as full, [rows, columns] bool; each list has every column once."""
    found = []
    for count, columns in ((lists.num_partial, lists.partial), (lists.num_full, lists.full)):
        assert (np.sort(columns, axis=1) == np.arange(columns.shape[1])).all()
        blocks = np.zeros(columns.shape, dtype=bool)
        for row, number in enumerate(count):
            blocks[row, columns[row, :number]] = True
        found.append(blocks)
    return found[0], found[1]


@pytest.mark.parametrize(
    ("first", "number", "longest", "block_size"), [(0, 480, 20, 4), (480, 480, 40, 16), (960, 40, 200, 128)]
)
def test_a_block_is_partial_or_full_or_absent_as_its_pairs_are_visible(first, number, longest, block_size):
    """1,000 random packs in the three cases."""
    for seed in range(first, first + number):
        for segments, num_keys, window in random_packs(seed, longest):
            visible = visibility(segments, num_keys, window).numpy()
            keys, column = visible_keys(segments, window), np.arange(num_keys)
            own = (column >= keys.own_start[:, None]) & (column < keys.own_stop[:, None])
            prefix = (column >= keys.prefix_start[:, None]) & (column < keys.prefix_stop[:, None])
            assert not (own & prefix).any()
            assert ((own | prefix) == visible).all(), (seed, segments, window)
            # torch pads with invisible pairs, so that a block over the edge is partial
            padded = np.pad(visible, [(0, -size % block_size) for size in visible.shape])
            rows, columns = (size // block_size for size in padded.shape)
            pairs = padded.reshape(rows, block_size, columns, block_size)
            some, every = pairs.any(axis=(1, 3)), pairs.all(axis=(1, 3))
            by_query, by_key = block_lists(keys, num_keys, block_size)
            for lists, transpose in ((by_query, False), (by_key, True)):
                partial_blocks, full_blocks = listed_blocks(lists)
                assert (partial_blocks == ((some & ~every).T if transpose else some & ~every)).all(), (seed, segments)
                assert (full_blocks == (every.T if transpose else every)).all(), (seed, segments)


@pytest.mark.parametrize("window", [None, 150])
def test_the_block_mask_equals_that_of_torch(window):
    """In every list and in the order of its blocks; also for a row shorter than a block."""
    for sizes in ([(300, 200, 260), (10, 3, 9)], [(5, 4, 3)], [(200, 100, 1)]):
        inputs = SHARED.collate(batch_of(*(pair_of(*lengths, seed=at) for at, lengths in enumerate(sizes))))
        num_keys = inputs.model_inputs["input_ids"].shape[1]
        for segments in (inputs.segments, inputs.kept.visibility.segments):
            visible = visibility(segments, num_keys, window)
            expected = create_block_mask(
                lambda _batch, _head, query, key, visible=visible: visible[query, key],
                None,
                None,
                *visible.shape,
                "cpu",
            )
            found = block_mask(segments, num_keys, window, CPU)
            assert found.shape == expected.shape
            assert found.BLOCK_SIZE == expected.BLOCK_SIZE
            for name in LIST_NAMES:
                assert torch.equal(getattr(found, name), getattr(expected, name)), name
                assert getattr(found, name).dtype == getattr(expected, name).dtype
                assert not getattr(found, name)._is_view()  # of the one copy; a kernel would be compiled for its offset


def test_a_mask_of_16k_rows_takes_no_memory_per_query_and_key():
    inputs = SHARED.collate(batch_of(*(pair_of(256, 384, 384, seed=at) for at in range(16))))
    num_rows = inputs.model_inputs["input_ids"].shape[1]
    assert num_rows > 16_000
    tracemalloc.start()
    mask = block_mask(inputs.segments, num_rows, None, CPU)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < num_rows**2 / 20  # a matrix of bytes would be 267 MB
    assert mask.sparsity() > 95


def test_layers_share_the_mask_of_a_micro_batch_which_ends_with_it():
    segments = (Segment(0, 5), Segment(5, 9, 0, 3))
    visibilities = [PackedAttention(segments) for _ in range(9)]
    masks = [cached_mask(each, 9, None, CPU) for each in visibilities]
    for each, mask in zip(visibilities, masks, strict=True):  # after those of many other micro-batches in flight
        assert cached_mask(each, 9, None, CPU) is mask
        assert cached_mask(each, 9, 2, CPU) is not mask
    assert len({id(mask) for mask in masks}) == len(masks)


class CountingBackend:
    """Counts traced graphs, and runs them as they are or returns a zero for each of their outputs."""

    def __init__(self, *, runs: bool = True) -> None:
        self.graphs, self.runs = 0, runs

    def __call__(self, graph: torch.fx.GraphModule, _inputs: list[torch.Tensor]) -> Callable[..., object]:
        self.graphs += 1
        zeros = [torch.zeros(())] * len(graph.graph.output_node().args[0])
        return graph.forward if self.runs else lambda *_inputs: zeros


SIZES = [
    [(100, 60, 70)],
    [(300, 200, 100)],
    [(256, 128, 384), (256, 128, 384)],
    [(31, 400, 300), (5, 9, 8)],
    [(600, 10, 12)],  # the kept rows fit into one block
    [(30, 20, 10)],  # all rows do
]


def packs(sizes):
    """Segments, number of queries and number of keys of all rows and of kept rows."""
    inputs = SHARED.collate(batch_of(*(pair_of(*lengths, seed=at) for at, lengths in enumerate(sizes))))
    num_keys = inputs.model_inputs["input_ids"].shape[1]
    return [(inputs.segments, num_keys, num_keys), (inputs.kept.visibility.segments, len(inputs.kept.rows), num_keys)]


def heads(num_queries: int, num_keys: int, dtype: torch.dtype, *, with_grad: bool) -> list[torch.Tensor]:
    """Queries, keys and values with the strides that a model gives them."""
    generator = torch.Generator().manual_seed(num_queries)
    shapes = [(1, num_queries, 4, 16), (1, num_keys, 2, 16), (1, num_keys, 2, 16)]
    parts = [torch.randn(shape, generator=generator).to(dtype).transpose(1, 2) for shape in shapes]
    return [part.requires_grad_(with_grad) for part in parts]


@pytest.fixture
def backward_on_cpu(monkeypatch):
    """Let torch trace a backward for CPU tensors; graphs that run as traced compute it by its definition."""
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *_heads: None)


@pytest.mark.slow
@pytest.mark.usefixtures("backward_on_cpu")
def test_rows_of_any_length_need_a_bounded_number_of_compiled_variants():
    backend = CountingBackend(runs=False)
    attend = compile_flex_attention(backend, MAX_COMPILED_VARIANTS)
    for dtype, with_grad in product((torch.float32, torch.bfloat16), (True, False)):
        for sizes, window in zip(SIZES, (None, 50) * 3, strict=True):
            for segments, num_queries, num_keys in packs(sizes):
                inputs = heads(num_queries, num_keys, dtype, with_grad=with_grad)
                mask = block_mask(segments, num_keys, window, CPU)
                with torch.set_grad_enabled(with_grad):
                    flex_segment_attention(*inputs, mask, 0.25, None, attend)
    assert 4 <= backend.graphs <= 14  # a limit of 32 leaves room for layers of two kinds


@pytest.mark.slow
@pytest.mark.usefixtures("backward_on_cpu")
@pytest.mark.parametrize(("window", "softcap", "has_sinks"), [(None, None, False), (50, 1.5, False), (50, None, True)])
def test_compiled_attention_equals_dense_attention_forward_and_backward(window, softcap, has_sinks):
    attend = compile_flex_attention(CountingBackend(), MAX_COMPILED_VARIANTS)
    for segments, num_queries, num_keys in packs([(40, 100, 70), (5, 9, 8)]):
        inputs = heads(num_queries, num_keys, torch.float32, with_grad=True)
        mask = block_mask(segments, num_keys, window, CPU)
        sinks = torch.linspace(-1, 2, inputs[0].shape[1], requires_grad=True) if has_sinks else None
        found = flex_segment_attention(*inputs, mask, 0.25, softcap, attend, sinks)
        expected = dense_attention(*inputs, segments, 0.25, softcap=softcap, window=window, sinks=sinks)
        inputs = [*inputs, sinks] if has_sinks else inputs
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(1))
        gradients = (torch.autograd.grad((out * weights).sum(), inputs) for out in (found, expected))
        for gradient, dense in zip(*gradients, strict=True):
            torch.testing.assert_close(gradient, dense, atol=2e-5, rtol=1e-4)


def test_one_variant_too_many_is_an_error_of_this_function_alone():
    before = torch._dynamo.config.recompile_limit
    attend, other = compile_flex_attention(CountingBackend(), 1), compile_flex_attention(CountingBackend(), 1)
    segments = (Segment(0, 5), Segment(5, 9, 0, 3))
    run = partial(flex_segment_attention, mask=block_mask(segments, 9, None, CPU), scale=0.3, softcap=None)
    inputs = {dtype: heads(9, 9, dtype, with_grad=False) for dtype in (torch.float32, torch.bfloat16)}
    run(*inputs[torch.float32], attend=attend)
    with pytest.raises(UserError, match=r"compiled for 1 kinds of inputs.*layout=padded.*TORCH_LOGS=recompiles"):
        run(*inputs[torch.bfloat16], attend=attend)
    run(*inputs[torch.float32], attend=attend)  # what is compiled still runs
    run(*inputs[torch.bfloat16], attend=other)
    assert torch._dynamo.config.recompile_limit == before


@pytest.mark.slow
def test_the_start_up_check_runs_compiled_attention_and_uncompiled_layers(monkeypatch):
    backend = CountingBackend()
    attend = compile_flex_attention(backend, MAX_COMPILED_VARIANTS)

    def flex_on_cpu(query, key, value, visibility, scale, softcap, window, sinks):
        mask = cached_mask(visibility, key.shape[2], window, query.device)
        return flex_segment_attention(query, key, value, mask, scale, softcap, attend, sinks)

    monkeypatch.setitem(KERNELS, "cpu", flex_on_cpu)
    model = PairModel.for_layout(tiny_model("llama"), torch.float32, SHARED)
    compile_layers(model.backbone)
    compiled_calls = [layer._compiled_call_impl for layer in model.backbone.layers]
    torch.compiler.reset()
    counters.clear()
    check_logps(model, SHARED, batch_of(pair_of(9, 7, 5, seed=1), pair_of(4, 6, 11, seed=2)))
    assert backend.graphs == 2  # all rows, and those that the last layer keeps
    assert counters["stats"]["unique_graphs"] == backend.graphs  # no layer
    assert [layer._compiled_call_impl for layer in model.backbone.layers] == compiled_calls
