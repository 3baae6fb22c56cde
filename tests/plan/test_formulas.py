"""The parts of a plan that need no process: rows of a micro-batch, FLOPs and bytes of known models, GPUs."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import init_empty_weights
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaConfig, Qwen3MoeConfig

from tests.support.stateful_models import STATEFUL
from thresher.builders.hardware import GPUS, find_gpu
from thresher.builders.memory import ModelSize, Process, held_memory, peak_memory
from thresher.config import DPOConfig
from thresher.config.roles import TrainingArgs
from thresher.data.batching.batches import CostModel, MicroBatching
from thresher.data.batching.plan import Plan
from thresher.data.example import Example, ExampleBatch
from thresher.distributed.mesh import ParallelDims
from thresher.engines.native.declaration import FSDP2Settings
from thresher.errors import UserError
from thresher.models.layouts import Layout, PackedLayout, PaddedLayout
from thresher.plan.estimate import Estimate
from thresher.plan.step import Cluster, step_flops, step_time, wire_bytes
from thresher.plan.workload import Rows, rows_of, sample_workload

LLAMA_8B = LlamaConfig(
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=128256,
)
LAYOUTS: list[Layout] = [
    *(PackedLayout(shares, scored=scored) for shares in (True, False) for scored in ("response", "all", "end")),
    *(PaddedLayout(pad_id=0, scored=scored) for scored in ("response", "all", "end")),
]


def size_of(config) -> ModelSize:
    with init_empty_weights():
        return ModelSize.of(AutoModelForCausalLM.from_config(config, dtype=torch.float32))


def process_of(size: ModelSize, dims: ParallelDims, **settings: Any) -> Process:
    """bf16 over weights in fp32."""
    return Process(size, dims, FSDP2Settings(**settings), TrainingArgs(), stored=4, compute=2, packs_rows=True)


@pytest.fixture(scope="module")
def llama_8b() -> ModelSize:
    return size_of(LLAMA_8B)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout.name}-{layout.scored}")
def test_rows_from_lengths_are_those_of_the_layout(layout):
    draw = np.random.default_rng(0)
    for _ in range(50):
        lengths = draw.integers(1, 9, size=(int(draw.integers(1, 6)), 3))
        pairs = tuple(Example.pair(*(np.arange(3, 3 + size, dtype=np.int32) for size in pair)) for pair in lengths)
        inputs = layout.collate(ExampleBatch(np.arange(len(pairs)), pairs))

        rows = rows_of(lengths.astype(np.uint32), layout)

        assert rows.total == inputs.model_inputs["input_ids"].numel()
        assert rows.scored == len(inputs.scored_rows)
        assert rows.useful == inputs.num_useful_tokens
        if inputs.segments is not None:
            assert rows.attended == sum(
                each.prefix_length * each.length + each.length * (each.length + 1) // 2 for each in inputs.segments
            )


def test_an_8b_model_sends_what_the_weights_and_precisions_give(llama_8b):
    """32 layers of 218,103,808 matrix elements in bf16; embedding, head and 65 norms in fp32; gradients in fp32.

    The embedding is not gathered for the backward, and the head stays gathered until then.
    """
    assert llama_8b.parameters.total == 8_030_261_248
    rows = Rows(total=4096, scored=2000, attended=4096 * 1000, useful=5000)
    process = process_of(llama_8b, ParallelDims(dp_shard=8))

    sent = wire_bytes(process, rows, micro_batches=2)

    matrices, outer = 32 * 218_103_808, 2 * 128256 * 4096 + 65 * 4096
    payload = 2 * (2 * 2 * matrices + 4 * outer) + 2 * 4 * 8_030_261_248
    assert sent == {"dp_shard": pytest.approx(7 / 8 * payload)}


def test_held_memory_is_16_bytes_per_trained_parameter_over_the_shards(llama_8b):
    memory = held_memory(process_of(llama_8b, ParallelDims(dp_shard=8)))
    assert memory.total == pytest.approx(16 * 8_030_261_248 / 8)


def test_stages_and_tensor_parallel_shards_add_up_to_the_model(llama_8b):
    for dims in (ParallelDims(pp=4), ParallelDims(tp=8), ParallelDims(pp=2, tp=4)):
        first = process_of(llama_8b, dims, pp_size=dims.pp)
        held = sum(replace(first, stage=stage).elements.total for stage in range(dims.pp))
        norms = llama_8b.others.total  # each process has all of its layers' norms
        assert dims.tp * (held - norms) + norms == pytest.approx(llama_8b.parameters.total)


def test_the_last_stage_has_a_copy_of_tied_embeddings(llama_8b):
    tied = replace(llama_8b, tied=True)
    whole = process_of(tied, ParallelDims())
    first = process_of(tied, ParallelDims(pp=2), pp_size=2)
    held = first.elements.total + replace(first, stage=1).elements.total
    assert held - whole.elements.total == 128256 * 4096


def test_rows_per_step_count_all_ranks_although_some_are_sampled():
    lengths = np.full((256, 3), (10, 5, 5), dtype=np.uint32)
    batching = MicroBatching(lengths, CostModel(attention_per_key=0, shares_prompt=True))
    layout = PackedLayout(shares_prompt=True)
    plan = Plan(num_pairs=256, seed=0, pairs_per_step=256, num_steps=1)
    workload = sample_workload(plan, batching, layout, num_ranks=128, is_assumed=True)
    assert workload.rows_per_step == rows_of(lengths, layout).total


def test_flops_are_six_per_parameter_and_row_for_short_rows(llama_8b):
    """Without attention to speak of, and with every row scored; the head's logits are computed once more."""
    rows = Rows(total=1000, scored=1000, attended=0, useful=1000)

    flops = step_flops(process_of(llama_8b, ParallelDims()), rows)

    in_products = 8_030_261_248 - 65 * 4096 - 128256 * 4096
    assert flops.model == pytest.approx(6 * in_products * 1000)
    assert flops.recomputed == pytest.approx(2 * 128256 * 4096 * 1000)


def test_mismatched_answers_cost_a_forward_more_and_a_reference_scores_them_too(llama_8b):
    rows = Rows(total=1000, scored=1000, attended=0, useful=1000)
    forward = 2 * (8_030_261_248 - 65 * 4096 - 128256 * 4096) * 1000  # the embedding is looked up
    for reference, num_forwards in ((None, 0), ("copy", 2)):
        process = replace(process_of(llama_8b, ParallelDims(dp_shard=8)), reference=reference)
        flops = step_flops(process, rows, mismatched=rows)
        assert flops.mismatched == pytest.approx(forward)
        assert flops.reference == pytest.approx(num_forwards * forward)
        assert flops.model == step_flops(process, rows).model
        assert wire_bytes(process, rows, 2, rows)["dp_shard"] > wire_bytes(process, rows, 2)["dp_shard"]


def test_a_step_of_kto_trains_one_answer_per_example_and_scores_another():
    """Prompts of 10, answers of 5, and mismatched answers of 3 tokens: rows without their last token."""
    lengths = np.full((256, 3), (10, 5, 3), dtype=np.uint32)
    layout = PackedLayout(shares_prompt=True)
    batching = MicroBatching(lengths, CostModel(attention_per_key=0, shares_prompt=True))
    plan = Plan(num_pairs=256, seed=0, pairs_per_step=256, num_steps=1)
    workload = sample_workload(plan, batching, layout, num_ranks=128, is_assumed=True, has_mismatched=True)
    assert (workload.rows_per_step, workload.step.total) == (256 * 14, 2 * 14)
    assert workload.mismatched is not None
    assert (workload.mismatched.total, workload.mismatched.scored) == (2 * 12, 2 * 3)
    assert workload.useful_per_step == 256 * 15


def test_attention_scores_that_the_backward_computes_again_are_not_model_flops(llama_8b):
    """Of a causal row of n tokens: n (n + 1) / 2 scores of 2 x 32 x 128 FLOPs, and as many for the weighted values."""
    size = replace(llama_8b, active=llama_8b.active * 0)
    rows = Rows(total=1000, scored=0, attended=500_500, useful=1000)

    flops = step_flops(process_of(size, ParallelDims()), rows)

    scores = 2 * 500_500 * 32 * 128 * 32
    assert flops.model == 6 * scores
    assert flops.recomputed == scores


def test_only_the_chosen_experts_compute():
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    size = size_of(Qwen3MoeConfig(**sizes, vocab_size=100, num_experts=8, num_experts_per_tok=2, num_key_value_heads=2))
    rows = Rows(total=10, scored=0, attended=0, useful=10)

    flops = step_flops(process_of(size, ParallelDims()), rows)

    experts = 2 * 8 * 3 * 64 * 32
    assert flops.model == pytest.approx(6 * (size.matrices.total - 3 / 4 * experts) * 10)


def test_a_group_that_spans_nodes_uses_the_network():
    cluster, dims = Cluster(GPUS["h100"], gpus_per_node=8, num_gpus=64), ParallelDims(dp_shard=8, tp=8)
    assert cluster.bandwidth("tp", dims) == 0.8 * 450e9
    assert cluster.bandwidth("dp_shard", dims) == 0.8 * 50e9


@pytest.mark.parametrize(("zero_stage", "covering"), [(3, 1.0), (2, 1.0), (1, 0.1)])
def test_what_computing_does_not_cover_of_fsdp2_is_exposed(llama_8b, zero_stage, covering):
    """ZeRO-1 gathers in the first of ten micro-batches, and reduces in the last."""
    process = process_of(llama_8b, ParallelDims(dp_shard=16), zero_stage=zero_stage)
    for total in (40_000, 400_000):
        rows = Rows(total=total, scored=0, attended=0, useful=total)

        time = step_time(process, Cluster(GPUS["h100"], 8, 16), rows, 10, "layers")

        expected = time.communication["dp_shard"] - covering * time.compute
        assert time.exposed == pytest.approx(max(0.0, expected))
        assert time.total == pytest.approx(time.compute + time.optimizer + time.exposed)


@pytest.mark.parametrize(("schedule", "is_exposed"), [("1f1b", False), ("zero_bubble", True)])
def test_zero_bubble_sums_replicas_after_the_last_backward(llama_8b, schedule, is_exposed):
    rows = Rows(total=400_000, scored=0, attended=0, useful=400_000)
    settings = {"pp_size": 2, "pp_schedule": schedule}
    process = process_of(llama_8b, ParallelDims(pp=2, dp_replicate=2), **settings)
    time = step_time(process, Cluster(GPUS["h100"], 8, 4), rows, 4, "functions")
    exposed = time.communication["pp"] + is_exposed * time.communication["dp_replicate"]
    assert time.exposed == pytest.approx(exposed)


def test_a_pipeline_waits_for_its_first_and_last_micro_batch(llama_8b):
    rows = Rows(total=40_000, scored=0, attended=0, useful=40_000)
    cluster, dims = Cluster(GPUS["h100"], 8, 4), ParallelDims(pp=4)
    times = {
        size: step_time(process_of(llama_8b, dims, pp_size=4, virtual_pp_size=size), cluster, rows, 12, "functions")
        for size in (1, 2)
    }
    assert times[1].bubble == pytest.approx(3 / 12 * times[1].compute)
    assert times[2].bubble == pytest.approx(times[1].bubble / 2)


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
    assert gpu.memory_bandwidth == GPUS["a100"].memory_bandwidth


def test_other_strategies_are_rejected():
    role = DPOConfig(pretrain="model").actor_train
    other = role.model_copy(update={"strategy_args": role.strategy_args.model_copy(update={"strategy_name": "other"})})
    config = DPOConfig(pretrain="model").model_copy(update={"actor_train": other})
    with pytest.raises(UserError, match="known for fsdp2_train, and actor_train uses other"):
        Estimate(config, Cluster(GPUS["h100"], gpus_per_node=8, num_gpus=8))


def test_the_head_of_a_reward_model_takes_next_to_no_memory(llama_8b):
    config = copy.deepcopy(LLAMA_8B)
    config.num_labels = 1
    with init_empty_weights():
        size = ModelSize.of(AutoModelForSequenceClassification.from_config(config, dtype=torch.float32))
    assert (size.vocab, size.head.total) == (1, config.hidden_size)
    for dims in (ParallelDims(dp_shard=8), ParallelDims(tp=8)):
        peak, other = (peak_memory(process_of(each, dims), 4096, 2, 1).total for each in (size, llama_8b))
        assert peak < other


@pytest.mark.parametrize(("family", "attending"), [("qwen3_5_text", 2), ("nemotron_h", 1), ("falcon_h1", 4)])
def test_only_layers_that_attend_add_to_the_flops_of_longer_sequences(family, attending):
    """Of Nemotron-H's five layers, two carry state and two are MLPs; those of Falcon-H1 attend and carry state."""
    size = size_of(STATEFUL[family])
    process = process_of(size, ParallelDims())
    near = Rows(total=64, scored=32, attended=1000, useful=64)
    added = step_flops(process, replace(near, attended=2000)).model - step_flops(process, near).model
    heads = STATEFUL[family].num_attention_heads * size.head_dim
    assert added == pytest.approx(3 * 4 * 1000 * heads * attending)
