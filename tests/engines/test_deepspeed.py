"""Every ZeRO stage of DeepSpeed trains like the oracle (examples/minimal_dpo.py) and logs what one process logs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import LongcatFlashConfig, LongcatFlashForCausalLM

from tests.support.engines.agreement import (
    assert_agree,
    assert_as_one_process,
    assert_parity,
    assert_same_weights,
    distance,
    run_parallel,
)
from tests.support.engines.parity import Case, score_single_process, train_parallel, train_single_process
from tests.support.engines.parity_cases import TRAINED_WHOLE
from tests.support.tiny_models import VOCAB
from thresher.distributed.mesh import ParallelDims

pytest.importorskip("deepspeed", reason="the extra deepspeed is not installed")

from tests.support.engines.deepspeed_engine import Zero
from tests.support.engines.deepspeed_runs import (
    score_base_and_policy,
    score_partitioned,
    train_in_two_groups,
    train_without_a_process_group,
)
from tests.support.engines.skipped_runs import train_with_discarded_step, train_with_nonfinite_step

pytestmark = pytest.mark.distributed
ENGINE = "deepspeed"
TWO_RANKS = ParallelDims(dp_shard=2)
STAGES = [Zero(stage) for stage in range(4)]
OFFLOADS = [Zero(2, offloads_optimizer=True), Zero(3, offloads_optimizer=True, offloads_param=True)]
OPTIONS = [
    (1, "reduce_scatter", False),
    (2, "contiguous_gradients", False),
    (2, "overlap_comm", True),
    (3, "contiguous_gradients", False),
]
MATRIX = [
    *(Case(TWO_RANKS, layout, engine=zero) for zero in STAGES for layout in ("shared", "padded")),
    *(Case(TWO_RANKS, loss="orpo", engine=zero) for zero in STAGES),
    *(Case(TWO_RANKS, engine=zero) for zero in OFFLOADS),
    *(Case(TWO_RANKS, "padded", engine=Zero(stage, options=((name, value),))) for stage, name, value in OPTIONS),
    Case(TWO_RANKS, "packed", engine=Zero(3, persists=100), also="some parameters stay gathered"),
    Case(TWO_RANKS, family="qwen2", engine=Zero(3), also="tied embeddings"),
    Case(TWO_RANKS, family="qwen2", engine=Zero(1), also="tied embeddings"),
    Case(TWO_RANKS, recompute="full", engine=Zero(3), also="gradient checkpointing"),
    Case(TWO_RANKS, max_grad_norm=0.01, engine=Zero(2), also="hard clipping"),
    Case(TWO_RANKS, max_grad_norm=0.01, engine=Zero(3), also="hard clipping"),
    Case(TWO_RANKS, pairs_per_step=1, engine=Zero(0), also="fewer pairs than ranks"),
    Case(TWO_RANKS, pairs_per_step=1, engine=Zero(2), also="fewer pairs than ranks"),
    Case(TWO_RANKS, tokens_at_once=40, engine=Zero(3), also="ranks with different numbers of micro-batches"),
    Case(TWO_RANKS, tokens_at_once=40, engine=OFFLOADS[0], also="ranks with different numbers of micro-batches"),
    Case(TWO_RANKS, loss="kto", engine=Zero(3), also="labelled responses (kto)"),
    Case(TWO_RANKS, loss="plackett_luce", engine=Zero(2), also="lists (plackett_luce)"),
    Case(TWO_RANKS, loss="bradley_terry", engine=Zero(2), also="a reward model"),
    Case(TWO_RANKS, loss="bradley_terry", engine=Zero(3), also="a reward model"),
]
AGAINST_ONE_PROCESS = [
    *(Case(TWO_RANKS, lora_rank=4, engine=zero, also="LoRA") for zero in (Zero(1), Zero(3))),
    Case(
        TWO_RANKS,
        family="qwen2",
        lora_rank=4,
        lora_options=TRAINED_WHOLE,
        engine=Zero(2),
        also="DoRA, modules trained whole",
    ),
    Case(TWO_RANKS, loss="aot", engine=Zero(3), also="a loss that couples pairs"),
    Case(TWO_RANKS, engine=Zero(3), frozen=("model.layers.0", "lm_head"), also="frozen modules"),
    Case(TWO_RANKS, family="qwen3_moe", engine=Zero(2), router_loss_coef=0.5, also="load-balancing loss"),
    Case(TWO_RANKS, family="qwen3_moe", engine=Zero(3), router_loss_coef=0.5, also="load-balancing loss"),
    Case(
        TWO_RANKS,
        family="qwen3_moe",
        engine=Zero(3),
        router_loss_coef=0.5,
        pairs_per_step=9,
        tokens_at_once=150,  # one micro-batch and two, in the first and the last step
        also="load-balancing loss, ranks with different numbers of micro-batches",
    ),
    Case(TWO_RANKS, engine=Zero(1), counts_zeros=True, also="zeros in gradients"),
    Case(TWO_RANKS, engine=Zero(3), counts_zeros=True, also="zeros in gradients"),
]


@pytest.mark.covered
@pytest.mark.parametrize("case", MATRIX, ids=str)
def test_three_steps_of_every_stage_equal_the_oracle(case, pool_of, model_dirs, oracle, one_process):
    outcomes = run_parallel(case, pool_of, model_dirs)
    assert_parity(case, outcomes, oracle(case), one_process(case))


@pytest.mark.covered
@pytest.mark.parametrize("case", AGAINST_ONE_PROCESS, ids=str)
def test_cases_without_an_oracle_equal_one_process(case, pool_of, model_dirs, one_process):
    outcomes, alone = run_parallel(case, pool_of, model_dirs), one_process(case)
    assert_as_one_process(case, outcomes, alone)
    for name, (_, after) in (item for outcome in outcomes for item in outcome.frozen_weights.items()):
        torch.testing.assert_close(after, alone.frozen_weights[name][1], rtol=0, atol=0)


def test_ranks_that_route_tokens_to_different_experts_equal_one_process(pool_of, tmp_path):
    torch.manual_seed(0)
    config = LongcatFlashConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        num_layers=2,
        num_hidden_layers=4,  # attentions, two per layer
        num_attention_heads=4,
        ffn_hidden_size=48,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        head_dim=8,
        v_head_dim=8,
        moe_topk=2,
        n_routed_experts=8,
        zero_expert_num=2,
        expert_ffn_hidden_size=16,
        initializer_range=0.2,
    )
    LongcatFlashForCausalLM(config).save_pretrained(tmp_path)
    case = Case(TWO_RANKS, "padded", engine=Zero(3))
    outcomes = pool_of(2).run(train_parallel, case, tmp_path, tmp_path)

    alone = train_single_process(replace(case, sizes=ParallelDims(), engine=None), tmp_path, tmp_path)
    assert_as_one_process(case, outcomes, alone)


@pytest.mark.covered
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.01), (torch.float16, 0.00125)], ids=str)
def test_half_precision_agrees_to_its_precision(stage, dtype, tolerance, pool_of, model_dirs, oracle, one_process):
    case = Case(TWO_RANKS, dtype=dtype, engine=Zero(stage))
    outcomes = run_parallel(case, pool_of, model_dirs)

    alone, exact = one_process(case), oracle(case)
    by_rounding = distance(alone.weights, exact.weights)
    assert by_rounding > 0
    for outcome in outcomes:
        assert outcome.skipped_steps == 0
        assert distance(outcome.weights, exact.weights) < 1.5 * by_rounding
        for logged, of_oracle, norm in zip(outcome.metrics, exact.metrics, exact.grad_norms, strict=True):
            assert_agree(logged, {"loss": of_oracle["loss"], "grad_norm": norm}, tolerance=tolerance)


@pytest.mark.parametrize("zero", [*STAGES, *OFFLOADS], ids=str)
def test_a_non_finite_loss_of_one_rank_changes_nothing_on_any_rank(zero, pool_of, model_dirs):
    case = Case(TWO_RANKS, nonfinite_pair=0, engine=zero)
    for outcome in pool_of(2).run(train_with_nonfinite_step, case, *model_dirs(case.family, case.num_layers)):
        digests = [outcome.before, *outcome.digests]
        for step, skipped in enumerate(outcome.skipped):
            assert (skipped is not None) == (0 in case.plan.pair_ids(step))
            assert (digests[step] == digests[step + 1]) == (skipped is not None)
        assert sum(skipped is not None for skipped in outcome.skipped) == 1


@pytest.mark.parametrize("zero", [*STAGES, *OFFLOADS], ids=str)
def test_an_overflow_of_fp16_halves_the_scale_and_changes_nothing(zero, pool_of, model_dirs):
    case = Case(TWO_RANKS, loss="simpo", dtype=torch.float16, engine=zero)
    for outcome in pool_of(2).run(train_with_nonfinite_step, case, *model_dirs(case.family, case.num_layers), 1e6):
        assert [skipped is not None for skipped in outcome.skipped] == [False, True, False]
        assert (outcome.skipped[1].reason, outcome.skipped[1].loss_scale) == ("overflow", 2**15)
        assert outcome.digests[0] == outcome.digests[1] != outcome.digests[2]


@pytest.mark.parametrize("layout", ["shared", "padded"])
def test_a_partitioned_reference_scores_as_one_process(layout, pool_of, model_dirs):
    _, model_dir = model_dirs("llama")
    case = Case(TWO_RANKS, layout, engine=Zero(3))
    for rank, found in enumerate(pool_of(2).run(score_partitioned, case, model_dir)):
        expected = score_single_process(replace(case, engine=None), model_dir, rank, 2)
        assert len(found) == len(expected)
        for scores, of_one in zip(found, expected, strict=True):
            torch.testing.assert_close(torch.tensor(scores), torch.tensor(of_one), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("zero", [Zero(2), Zero(3)], ids=str)
def test_the_base_of_an_adapter_scores_as_before_training(zero, pool_of, model_dirs):
    case = Case(TWO_RANKS, loss="simpo", lora_rank=4, engine=zero)
    for before, base, policy in pool_of(2).run(score_base_and_policy, case, model_dirs("llama")[0]):
        assert base == before
        assert policy != before


@pytest.mark.parametrize("zero", [Zero(1), Zero(3)], ids=str)
def test_a_discarded_step_leaves_no_gradient(zero, pool_of, model_dirs, oracle):
    case = Case(ParallelDims(), tokens_at_once=40, engine=zero)
    (norms,) = pool_of(1).run(train_with_discarded_step, case, *model_dirs(case.family, case.num_layers))
    assert norms == pytest.approx(oracle(case).grad_norms, abs=1e-5)


def test_a_single_process_without_a_process_group_equals_the_oracle(pool_of, model_dirs, oracle):
    case = Case(ParallelDims(), engine=Zero(3))
    (outcome,) = pool_of(1).run(train_without_a_process_group, case, *model_dirs(case.family, case.num_layers))
    expected = oracle(case)
    assert outcome.grad_norms == pytest.approx(expected.grad_norms, abs=1e-5)
    assert_same_weights(outcome.weights, expected.weights)


@pytest.mark.parametrize("zero", [Zero(2), Zero(3)], ids=str)
def test_a_second_run_in_the_process_equals_the_first(zero, pool_of, model_dirs, tmp_path):
    case = Case(TWO_RANKS, engine=zero)
    dirs = model_dirs(case.family, case.num_layers)
    for first, second in pool_of(2).run(train_in_two_groups, case, *dirs, tmp_path / "store"):
        assert second.grad_norms == first.grad_norms
        assert all(torch.equal(second.weights[name], weight) for name, weight in first.weights.items())
