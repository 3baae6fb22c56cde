"""Bytes that a step sends along each axis equal the formulas in docs/internals/plan-accuracy.md."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.engines.communication import count_calls_of_step, count_step
from tests.support.engines.parity import LAYOUTS, PAIRS, Case, PairsInMemory, micro_batching_of
from thresher.distributed.mesh import ParallelDims

pytestmark = pytest.mark.distributed

BYTES = 4  # of a number in fp32
MESHES = (
    ParallelDims(dp_shard=2),
    ParallelDims(dp_shard=4),
    ParallelDims(dp_replicate=2),
    ParallelDims(tp=2),
    ParallelDims(tp=4),
    ParallelDims(cp=2),
    ParallelDims(cp=4),
    ParallelDims(dp_replicate=2, dp_shard=2),
    ParallelDims(dp_shard=2, tp=2),
    ParallelDims(dp_shard=2, cp=2),
    ParallelDims(cp=2, tp=2),
)


@dataclass(frozen=True)
class Shape:
    """Sizes of a model: P, Q, L, H, A and K of the docs."""

    parameters: int
    matrices: int
    layers: int
    hidden: int
    queries: int
    keys: int


@dataclass(frozen=True)
class Work:
    """Work of a data-parallel rank in a step: M, T, S and R of the docs."""

    micro_batches: int
    tokens: int
    scored: int
    last_layer_rows: int


def shape_of(model_dir) -> Shape:
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    config = model.config
    return Shape(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        matrices=sum(each.numel() for each in model.model.layers.parameters() if each.ndim > 1),
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        queries=config.num_attention_heads * config.head_dim,
        keys=config.num_key_value_heads * config.head_dim,
    )


def work_of(case: Case, data_rank: int) -> Work:
    store = PairsInMemory(PAIRS)
    cut = micro_batching_of(case).split(case.plan.pair_ids(1), data_rank, case.sizes.num_data_ranks)
    inputs = [LAYOUTS[case.layout].collate(store.read(pair_ids)) for pair_ids in cut]
    cp = case.sizes.cp
    # rows are padded to a multiple of cp
    tokens = sum(-(-batch.model_inputs["input_ids"].numel() // cp) * cp for batch in inputs)
    # the last layer skips unscored rows only without context parallelism
    kept = tokens if cp > 1 else sum(len(batch.kept.rows) for batch in inputs)
    return Work(len(cut), tokens, sum(len(batch.scored_rows) for batch in inputs), kept)


def formula(sizes: ParallelDims, shape: Shape, work: Work, zero_stage: int = 3) -> dict[str, float]:
    """The formulas of docs/internals/plan-accuracy.md, per process."""
    weights = shape.parameters / sizes.tp
    tokens, scored, last = (number / sizes.cp for number in (work.tokens, work.scored, work.last_layer_rows))
    numbers = dict.fromkeys(("all_gather", "reduce_scatter", "all_reduce", "all_to_all"), 0.0)
    if sizes.fsdp_size > 1:
        again = shape.matrices / sizes.tp if zero_stage == 3 else 0
        numbers["all_gather"] += weights if zero_stage == 1 else (weights + again) * work.micro_batches
        numbers["reduce_scatter"] += weights * (1 if zero_stage == 1 else work.micro_batches)
    if sizes.dp_replicate > 1:
        numbers["all_reduce"] += weights / sizes.fsdp_size
    if sizes.cp > 1:
        numbers["all_to_all"] += 4 * shape.layers * tokens * (shape.queries + shape.keys) / sizes.tp
        numbers["all_reduce"] += work.scored
    if sizes.tp > 1:
        rows = 7 * (shape.layers - 1) * tokens + 2 * tokens + 5 * last + tokens + scored
        numbers["all_reduce"] += shape.hidden * rows + 3 * scored
    return {kind: BYTES * number for kind, number in numbers.items()}


CASES = [
    *(Case(sizes, loss="simpo") for sizes in MESHES),  # no reference: only the policy sends
    *(
        Case(sizes, loss="simpo", zero_stage=stage, also=f"zero_stage {stage}")
        for stage in (1, 2)
        for sizes in (MESHES[0], ParallelDims(dp_shard=2, cp=2), ParallelDims(dp_replicate=2, dp_shard=2))
    ),
]


@pytest.mark.covered
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_step_sends_the_bytes_of_the_formula(case, pool_of, model_dirs):
    sizes = case.sizes
    model_dir, _ = model_dirs("llama")
    shape = shape_of(model_dir)

    for process, counted in enumerate(pool_of(sizes.num_processes).run(count_step, case, model_dir)):
        expected = formula(sizes, shape, work_of(case, process // (sizes.cp * sizes.tp)), case.zero_stage)
        assert counted.keys() <= expected.keys()
        # counts, metrics and norms add a few hundred bytes per step
        small = sum(expected.values()) / 100
        for kind, number in expected.items():
            assert counted.get(kind, 0) == pytest.approx(number, rel=0.02, abs=small)


def test_zero_stage_2_gathers_each_layer_once_per_micro_batch_and_zero_stage_1_once_per_step(two_ranks, model_dirs):
    plain = Case(ParallelDims(dp_shard=2), loss="simpo")
    model_dir, _ = model_dirs("llama")
    num_layers, num_micro_batches = shape_of(model_dir).layers, work_of(plain, 0).micro_batches
    assert num_micro_batches > 1

    stage_3 = two_ranks.run(count_calls_of_step, plain, model_dir)
    stage_2 = two_ranks.run(count_calls_of_step, replace(plain, zero_stage=2), model_dir)
    stage_1 = two_ranks.run(count_calls_of_step, replace(plain, zero_stage=1), model_dir)

    others = 1 + 1 + 2  # embedding and head once; the root with all norms in the forward and in the backward
    for before, after, once in zip(stage_3, stage_2, stage_1, strict=True):
        assert before["all_gather"] == (2 * num_layers + others) * num_micro_batches
        assert after["all_gather"] == (num_layers + others) * num_micro_batches
        assert after["reduce_scatter"] == before["reduce_scatter"] == (num_layers + 3) * num_micro_batches
        assert once["all_gather"] == once["reduce_scatter"] == num_layers + 3


def test_bf16_between_stages_halves_the_bytes_that_they_send(two_ranks, model_dirs):
    """The first stage sends hidden states, and the last one their gradients."""
    wide = Case(ParallelDims(pp=2), loss="simpo", dtype=torch.bfloat16)
    model_dir, _ = model_dirs("llama")
    before, after = (two_ranks.run(count_step, case, model_dir) for case in (wide, replace(wide, pp_dtype="bf16")))
    for one, other in zip(before, after, strict=True):
        assert 0 < other["send"] == pytest.approx(one["send"] / 2, rel=0.01)


def test_all_ranks_have_the_same_number_of_micro_batches():
    """Otherwise the formula would have to count dummy batches."""
    for sizes in MESHES:
        case = Case(sizes)
        assert len({work_of(case, rank).micro_batches for rank in range(sizes.num_data_ranks)}) == 1
