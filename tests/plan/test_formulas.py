"""The parts of a plan that need no process: rows of a micro-batch, wire bytes, shapes of known models."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from accelerate import init_empty_weights
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

from thresher.config import DPOConfig
from thresher.data.pair import Pair, PairBatch
from thresher.distributed.mesh import ParallelDims
from thresher.errors import UserError
from thresher.models.layouts import Layout, PackedLayout, PaddedLayout
from thresher.plan.activations import MemorySettings
from thresher.plan.compute import (
    Cluster,
    Flops,
    StepCosts,
    roofline,
    step_flops,
)
from thresher.plan.estimate import Estimate
from thresher.plan.hardware import GPUS, find_gpu
from thresher.plan.memory import persistent_memory
from thresher.plan.model import ModelShape, Stage
from thresher.plan.traffic import Message, Precision, TrafficSettings, step_messages
from thresher.plan.workload import Rows, dummy_rows, rows_of
from thresher.strategies.native.sequential import DUMMY_BATCH

LLAMA_8B = LlamaConfig(
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=128256,
)
BF16 = Precision(stored=4, compute=2)
LAYOUTS: list[Layout] = [
    *(PackedLayout(shares, scores_prompt=scores) for shares in (True, False) for scores in (True, False)),
    *(PaddedLayout(pad_id=0, scores_prompt=scores) for scores in (True, False)),
]


def shape_of(config) -> ModelShape:
    with init_empty_weights():
        return ModelShape.of(AutoModelForCausalLM.from_config(config, dtype=torch.float32))


@pytest.fixture(scope="module")
def llama_8b() -> ModelShape:
    return shape_of(LLAMA_8B)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout.name}-{layout.scores_prompt}")
def test_rows_from_lengths_are_those_of_the_layout(layout):
    draw = np.random.default_rng(0)
    for _ in range(50):
        lengths = draw.integers(1, 9, size=(int(draw.integers(1, 6)), 3))
        pairs = tuple(Pair(*(np.arange(3, 3 + size, dtype=np.int32) for size in pair)) for pair in lengths)
        inputs = layout.collate(PairBatch(np.arange(len(pairs)), pairs))

        rows = rows_of(lengths.astype(np.uint32), layout)

        assert rows.total == inputs.model_inputs["input_ids"].numel()
        assert rows.scored == len(inputs.scored_rows)
        assert rows.useful == inputs.num_useful_tokens
        if inputs.kept is not None:
            assert rows.kept == len(inputs.kept.rows)
            assert inputs.segments is not None
            assert rows.attended == sum(
                each.prefix_length * each.length + each.length * (each.length + 1) // 2 for each in inputs.segments
            )


def test_a_dummy_batch_has_the_rows_of_the_executor():
    for layout in LAYOUTS:
        assert dummy_rows(layout).total == layout.collate(DUMMY_BATCH).model_inputs["input_ids"].numel()


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("all_reduce", 150.0), ("all_gather", 75.0), ("reduce_scatter", 75.0), ("all_to_all", 75.0), ("send", 100.0)],
)
def test_wire_bytes_of_a_ring_of_four(kind, expected):
    assert Message("dp_shard", kind, 100, size=4).wire_bytes == expected


def test_an_8b_model_sends_what_the_weights_and_precisions_give(llama_8b):
    """32 layers of 218,103,808 matrix elements in bf16; embedding, head and 65 norms in fp32; gradients in fp32.

    The embedding is not gathered for the backward, and the head stays gathered until then.
    """
    assert llama_8b.num_parameters == 8_030_261_248
    matrices, outer, norms = 32 * 218_103_808, 128256 * 4096, 65 * 4096
    stage = Stage.of(llama_8b, ParallelDims(dp_shard=8))
    rows = Rows(total=4096, scored=2000, kept=2000, attended=4096 * 1000, useful=5000, pairs=4)

    messages = step_messages(stage, [rows, rows], rows, TrafficSettings(BF16, packs_rows=True))

    payload = {
        kind: sum(m.payload_bytes for m in messages if m.kind == kind) for kind in ("all_gather", "reduce_scatter")
    }
    assert payload["all_gather"] == 2 * (2 * (2 * matrices + 4 * norms) + 2 * 4 * outer)
    assert payload["reduce_scatter"] == 2 * 4 * 8_030_261_248


def test_persistent_memory_is_16_bytes_per_trained_parameter_over_the_shards(llama_8b):
    stage = Stage.of(llama_8b, ParallelDims(dp_shard=8))

    memory = persistent_memory(stage, MemorySettings(BF16, packs_rows=True))

    assert memory.persistent == 16 * 8_030_261_248 // 8 + 4 * len(llama_8b.parameters)


def test_stages_and_tensor_parallel_shards_add_up_to_the_model(llama_8b):
    for dims in (ParallelDims(pp=4), ParallelDims(tp=8), ParallelDims(pp=2, tp=4)):
        stages = [Stage.of(llama_8b, dims, index) for index in range(dims.pp)]
        norms = sum(p.numel for stage in stages for p in stage.parameters if len(p.shape) == 1)
        held = sum(p.numel for stage in stages for p in stage.parameters)
        assert dims.tp * (held - norms) + norms == llama_8b.num_parameters


def test_flops_are_six_per_parameter_and_row_for_short_rows(llama_8b):
    """Without attention to speak of, and with every row scored; the head's logits are computed once more."""
    rows = Rows(total=1000, scored=1000, kept=1000, attended=0, useful=1000, pairs=1)
    stage = Stage.of(llama_8b, ParallelDims())

    flops = step_flops(stage, [rows], packs_rows=False, recompute="off", scores_reference=False)

    in_products = 8_030_261_248 - 65 * 4096 - 128256 * 4096
    assert flops.model == pytest.approx(6 * in_products * 1000)
    assert flops.recomputed == 2 * 128256 * 4096 * 1000


def test_only_the_chosen_experts_compute():
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    shape = shape_of(
        Qwen3MoeConfig(**sizes, vocab_size=100, num_experts=8, num_experts_per_tok=2, num_key_value_heads=2)
    )
    rows = Rows(total=10, scored=0, kept=10, attended=0, useful=10, pairs=1)

    flops = step_flops(
        Stage.of(shape, ParallelDims()), [rows], packs_rows=True, recompute="off", scores_reference=False
    )

    experts = sum(p.numel for p in shape.parameters if len(p.shape) == 3)
    others = sum(p.numel for p in shape.parameters if len(p.shape) == 2 and p.layer is not None)
    assert experts == 2 * 8 * 3 * 64 * 32
    assert flops.model == 6 * (experts / 4 + others) * 10


def test_a_group_that_spans_nodes_uses_the_network():
    cluster, dims = Cluster(GPUS["h100"], gpus_per_node=8, num_gpus=64), ParallelDims(dp_shard=8, tp=8)
    assert cluster.bandwidth("tp", dims) == 0.8 * 450e9
    assert cluster.bandwidth("dp_shard", dims) == 0.8 * 50e9


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("4090", "rtx-4090"),
        ("RTX 5090", "rtx-5090"),
        ("rtx3090", "rtx-3090"),
        ("NVIDIA A10G", "a10g"),
        ("A100", "a100"),
        ("A100-40GB", "a100-40gb"),
        ("AMD Instinct MI300X", "mi300x"),
        ("Tesla T4", "t4"),
    ],
)
def test_a_gpu_is_found_as_people_write_it(name, found):
    assert find_gpu(name).name == found


def test_the_memory_of_a_gpu_and_the_time_to_read_it_are_plausible():
    """A digit too many is far from all others: reading the memory takes 18 to 80 ms, at 37 to 419 FLOP per byte."""
    for gpu in GPUS.values():
        assert 0.014 < gpu.memory / gpu.memory_bandwidth < 0.081, gpu.name
        assert 36 < gpu.peak_flops / gpu.memory_bandwidth < 430, gpu.name
    assert [name for name, gpu in GPUS.items() if not gpu.has_bf16] == ["t4", "v100"]


def test_rates_replace_those_of_a_gpu():
    gpu = find_gpu("A100").with_rates(peak_flops=100, memory=24, bandwidth=10)
    assert (gpu.peak_flops, gpu.memory, gpu.inter_node) == (100e12, 24e9, 10e9)


def test_other_strategies_are_rejected():
    role = DPOConfig(pretrain="model").actor_train
    other = role.model_copy(update={"strategy_args": role.strategy_args.model_copy(update={"strategy_name": "other"})})
    config = DPOConfig(pretrain="model").model_copy(update={"actor_train": other})
    with pytest.raises(UserError, match="the formulas are those of fsdp2_train, and actor_train uses other"):
        Estimate(config, Cluster(GPUS["h100"], gpus_per_node=8, num_gpus=8))


@pytest.mark.parametrize(
    ("zero_stage", "gathered", "reduced", "exposed"),
    [
        # of 3 s of computation, 1 s is in the forward; half of the gathers of ZeRO-3 are in the forward
        (3, 2.0, 1.0, 0.0),
        (3, 3.0, 0.0, 0.5),
        (3, 1.0, 2.0, 0.5),
        (2, 1.5, 2.0, 0.5),
        # ZeRO-1 gathers in the first of ten forwards, and reduces in the last of ten backwards
        (1, 0.1, 0.2, 0.0),
        (1, 0.2, 0.5, 0.4),
    ],
)
def test_sharding_hides_behind_the_computation_of_the_same_pass(llama_8b, zero_stage, gathered, reduced, exposed):
    gpu = find_gpu("h100")
    cluster, dims = Cluster(gpu, 8, 8), ParallelDims(dp_shard=8)
    per_second = round(cluster.bandwidth("dp_shard", dims) * 8 / 7)
    flops = 3 * 0.7 * gpu.peak_flops
    step = StepCosts(
        Flops(model=flops, forward=flops / 3),
        [
            Message("dp_shard", "all_gather", round(gathered * per_second), 8),
            Message("dp_shard", "reduce_scatter", round(reduced * per_second), 8),
        ],
        micro_batches=10,
        elementwise_bytes=0.0,
        trained_bytes=0.0,
        zero_stage=zero_stage,
    )
    found = roofline(Stage.of(llama_8b, dims), cluster, step)

    # copies around collectives take time too, and cover some of them
    copies = 3 * (gathered + reduced) * per_second / (0.8 * gpu.memory_bandwidth)
    assert found.copies == pytest.approx(copies)
    assert exposed - copies <= found.exposed <= exposed + 1e-6
    assert found.best == pytest.approx(3 + found.copies + found.exposed)
