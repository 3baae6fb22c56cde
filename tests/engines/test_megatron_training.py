"""Megatron-Core trains like the oracle (examples/minimal_dpo.py) on every axis and logs what one process logs."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from tests.support.engines.adapters import save_adapter
from tests.support.engines.agreement import (
    TOLERANCES,
    assert_agree,
    assert_as_one_process,
    assert_parity,
    distance,
    run_parallel,
)
from tests.support.engines.parity import PAIRS, Case, score_single_process
from tests.support.engines.skipped_runs import train_with_discarded_step
from tests.support.tiny_models import MIXED, batch_of
from thresher.distributed.mesh import ParallelDims
from thresher.engines.native.build import infer_engine
from thresher.models.layouts import PackedLayout
from thresher.models.loading.adapters import AdapterFiles, attach_adapter
from thresher.models.loading.load import load_model

pytest.importorskip("megatron.core", reason="the extra megatron is not installed")

from tests.support.engines.megatron_engine import (
    ReversedPositions,
    check_logps,
    load_adapter,
    on_megatron,
    score_with_and_without_adapter,
    train_with_skipped_step,
)

pytestmark = pytest.mark.distributed
ENGINE = "megatron"
DP, TP, PP, CP = (ParallelDims(**{axis: 2}) for axis in ("dp_replicate", "tp", "pp", "cp"))
TP_PP, DP_TP, DP_PP = ParallelDims(tp=2, pp=2), ParallelDims(dp_replicate=2, tp=2), ParallelDims(dp_replicate=2, pp=2)
OVERLAPS = {"overlap_grad_reduce": True, "overlap_param_gather": True}
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": "core_attn, mlp, layernorm"}
MATRIX = [
    *(on_megatron(Case(sizes, layout)) for sizes in (DP, TP, PP) for layout in ("shared", "packed", "padded")),
    *(on_megatron(Case(sizes, loss="orpo")) for sizes in (DP, TP, PP)),
    *(on_megatron(Case(sizes)) for sizes in (TP_PP, DP_TP, DP_PP, CP)),
    on_megatron(Case(TP, family="qwen3", also="norms within heads")),
    on_megatron(Case(PP, family="qwen2", also="tied embeddings")),
    on_megatron(Case(TP_PP, family="qwen2", also="tied embeddings")),
    on_megatron(Case(DP, also="no distributed optimizer"), use_distributed_optimizer=False),
    on_megatron(Case(DP, tokens_at_once=40, also="overlap, different numbers of micro-batches"), **OVERLAPS),
    on_megatron(Case(DP, pairs_per_step=1, also="fewer pairs than ranks")),
    on_megatron(Case(DP_PP, pairs_per_step=1, also="fewer pairs than ranks")),
    on_megatron(Case(TP, family="qwen3", also="sequence parallel"), sequence_parallel=True),
    on_megatron(Case(TP, "padded", also="sequence parallel"), sequence_parallel=True),
    on_megatron(Case(PP, virtual_pp_size=2, also="interleaved")),
    on_megatron(Case(PP, "padded", "orpo", "qwen2", virtual_pp_size=2, also="interleaved")),
    on_megatron(Case(DP, family="qwen3_moe", also="experts on every rank")),
    on_megatron(Case(DP, family="qwen3_moe", also="experts split"), ep_size=2),
    on_megatron(
        Case(DP, loss="orpo", family="qwen3_moe", also="experts split, no distributed optimizer"),
        ep_size=2,
        use_distributed_optimizer=False,
    ),
    on_megatron(Case(DP_PP, family="qwen3_moe", also="experts split"), ep_size=2),
    on_megatron(Case(TP, family="qwen3_moe", also="experts split"), ep_size=2, sequence_parallel=True),
    on_megatron(Case(TP, recompute="full", also="recompute full")),
    on_megatron(Case(PP, recompute="full", also="recompute full")),
    on_megatron(Case(TP, also="recompute selective"), **SELECTIVE),
    on_megatron(Case(TP_PP, max_grad_norm=0.01, also="hard clipping")),
    on_megatron(Case(DP, family="qwen3_moe", max_grad_norm=0.01, also="hard clipping, experts split"), ep_size=2),
    *(
        on_megatron(Case(sizes, loss=loss, also=also))
        for sizes in (DP, PP)
        for loss, also in (("kto", "labelled responses (kto)"), ("plackett_luce", "lists (plackett_luce)"))
    ),
]
LORA = {"lora_rank": 4, "also": "LoRA"}
AGAINST_ONE_PROCESS = [
    *(on_megatron(Case(sizes, **LORA)) for sizes in (DP, TP, PP)),
    on_megatron(Case(TP, family="qwen3", **LORA), sequence_parallel=True),
    on_megatron(Case(TP_PP, family="qwen2", lora_rank=4, recompute="full", also="LoRA, recompute full")),
    on_megatron(Case(DP, loss="aot", also="a loss that couples pairs")),
    on_megatron(Case(PP, loss="aot", also="a loss that couples pairs")),
    on_megatron(Case(PP, loss="aot", virtual_pp_size=2, also="a loss that couples pairs, interleaved")),
    on_megatron(Case(PP, frozen=("model.layers.0", "lm_head"), also="frozen modules")),
    on_megatron(Case(TP, counts_zeros=True, also="zeros in gradients")),
    on_megatron(Case(DP, family="qwen3_moe", counts_zeros=True, also="zeros in gradients"), ep_size=2),
]


@pytest.mark.covered
@pytest.mark.parametrize("case", MATRIX, ids=str)
def test_three_steps_on_every_axis_equal_the_oracle(case, pool_of, model_dirs, oracle, one_process):
    outcomes = run_parallel(case, pool_of, model_dirs)
    assert_parity(case, outcomes, oracle(case), one_process(case))


@pytest.mark.covered
@pytest.mark.parametrize("case", AGAINST_ONE_PROCESS, ids=str)
def test_cases_without_an_oracle_equal_one_process(case, pool_of, model_dirs, one_process):
    assert_as_one_process(case, run_parallel(case, pool_of, model_dirs), one_process(case))


@pytest.mark.covered
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("sizes", [DP, TP, PP], ids=["dp", "tp", "pp"])
def test_three_steps_in_half_precision_agree_to_it(sizes, dtype, pool_of, model_dirs, oracle, one_process):
    case = on_megatron(Case(sizes, dtype=dtype, initial_loss_scale=2.0**10))
    outcomes = run_parallel(case, pool_of, model_dirs)

    alone, exact = one_process(case), oracle(case)
    by_rounding = distance(alone.weights, exact.weights)
    assert by_rounding > 0
    for outcome in outcomes:
        assert outcome.skipped_steps == 0
        # Megatron-Core also rounds the residual stream, which stays in fp32 under autocast
        assert distance(outcome.weights, exact.weights) < 3 * by_rounding
        for logged, of_oracle, norm in zip(outcome.metrics, exact.metrics, exact.grad_norms, strict=True):
            assert_agree(logged, {"loss": of_oracle["loss"], "grad_norm": norm}, tolerance=4 * TOLERANCES[case.dtype])


@pytest.mark.parametrize(
    ("sizes", "settings"),
    [(DP, {}), (DP, {"use_distributed_optimizer": False}), (TP_PP, {})],
    ids=["distributed_optimizer", "dp", "tp_pp"],
)
def test_a_skipped_step_changes_nothing(sizes, settings, pool_of, model_dirs):
    case = on_megatron(Case(sizes, nonfinite_pair=0), **settings)
    for steps in pool_of(sizes.num_processes).run(train_with_skipped_step, case, *model_dirs("llama")):
        assert sum(skipped for skipped, _, _ in steps) == 1
        assert all(is_same == skipped for skipped, is_same, _ in steps)


def test_a_discarded_step_leaves_no_gradient(pool_of, model_dirs, oracle):
    case = on_megatron(Case(ParallelDims(), tokens_at_once=40))
    (norms,) = pool_of(1).run(train_with_discarded_step, case, *model_dirs(case.family, case.num_layers))
    assert norms == pytest.approx(oracle(case).grad_norms, abs=1e-5)


def test_a_disabled_adapter_leaves_the_base_model(two_ranks, model_dirs):
    policy, _ = model_dirs("qwen3")
    case = on_megatron(Case(TP, family="qwen3", lora_rank=4))
    (base,) = score_single_process(Case(ParallelDims()), policy, 0, 10)[:1]
    for adapted, disabled in two_ranks.run(score_with_and_without_adapter, case, policy, batch_of(*PAIRS[::10])):
        torch.testing.assert_close(disabled, torch.tensor(base), rtol=1e-5, atol=1e-5)
        assert not torch.allclose(adapted, disabled, atol=1e-3)


@pytest.mark.parametrize("sizes", [DP, PP], ids=["dp", "pp"])
def test_an_overflow_in_fp16_changes_nothing_but_the_loss_scale(sizes, two_ranks, model_dirs):
    case = on_megatron(Case(sizes, dtype=torch.float16, initial_loss_scale=2.0**40))
    for steps in two_ranks.run(train_with_skipped_step, case, *model_dirs("llama")):
        assert [(skipped, is_same) for skipped, is_same, _ in steps] == [(True, True)] * 3
        assert [scale for _, _, scale in steps] == [2.0**39, 2.0**38, 2.0**37]


@pytest.mark.parametrize("sizes", [TP, PP], ids=["tp", "pp"])
def test_an_adapter_on_disk_is_read_by_slices(sizes, two_ranks, model_dirs, tmp_path):
    policy, _ = model_dirs("llama")
    adapter = save_adapter(tmp_path / "adapter", policy)
    stored = load_file(adapter / "adapter_model.safetensors")
    batch = batch_of(*PAIRS[:3])
    base = load_model(str(policy))
    found = AdapterFiles.find(str(adapter))
    native = attach_adapter(base, found)
    found.load(base)
    scored = infer_engine(native, PackedLayout(shares_prompt=True), torch.float32).score(batch)
    expected = torch.cat([scored.chosen.values, scored.rejected.values])
    for loaded, ours, of_reference in two_ranks.run(load_adapter, on_megatron(Case(sizes)), policy, adapter, batch):
        assert {name.replace(".default", ""): name for name in loaded}.keys() == stored.keys()
        for name, tensor in loaded.items():
            assert torch.equal(tensor, stored[name.replace(".default", "")])
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(of_reference, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("axis", ["tp_size", "pp_size", "cp_size"])
@pytest.mark.parametrize("shares_prompt", [True, False], ids=["shared", "packed"])
def test_the_start_up_check_accepts_packed_rows(axis, shares_prompt, two_ranks, model_dirs):
    layout = PackedLayout(shares_prompt)
    assert two_ranks.run(check_logps, model_dirs("llama")[0], {axis: 2}, layout, MIXED) == [None, None]


def test_the_start_up_check_compares_context_parallel_rows_with_full_ones(two_ranks, model_dirs):
    wrong = ReversedPositions(shares_prompt=True)
    for error in two_ranks.run(check_logps, model_dirs("llama")[0], {"cp_size": 2}, wrong, MIXED):
        assert error is not None
        assert error.endswith("under Megatron-Core; remove context_parallel_size and use layout=padded")


def test_cases_have_different_names():
    cases = [*MATRIX, *AGAINST_ONE_PROCESS]
    assert len({str(case) for case in cases}) == len(cases)
