"""A pipeline makes the same steps as one process, for every schedule, layout, architecture and other axis."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from tests.support.engines.config_runs import config_of, train_from_config
from tests.support.engines.parity import (
    NUM_STEPS,
    Case,
    Outcome,
    save_model,
    train_parallel,
    train_single_process,
)
from tests.support.engines.parity_cases import INTERLEAVED, PIPELINES, TWO_STAGES
from tests.support.engines.pipeline_runs import check_logps, max_held_inputs, one_step
from tests.support.tiny_models import tiny_model
from thresher.builders.engines import check_engine
from thresher.distributed.mesh import ParallelDims
from thresher.engines.native.parallelize import partition_layers
from thresher.errors import UserError
from thresher.models.loading.load import load_model
from thresher.models.pipeline_chunk import check_accepts_hidden_states


def joined(ranks: list[Outcome]) -> dict[str, Tensor]:
    """The weights of all stages; those on two stages are bitwise equal."""
    weights: dict[str, Tensor] = {}
    for rank in ranks:
        for name, weight in rank.weights.items():
            assert torch.equal(weights.setdefault(name, weight), weight), name
    return weights


def check_against(expected: Outcome, ranks: list[Outcome], metrics: tuple[str, ...] = ("loss",)) -> None:
    for rank in ranks:
        assert rank.grad_norms == pytest.approx(expected.grad_norms, rel=1e-5, abs=1e-5)
        for ours, theirs in zip(rank.metrics, expected.metrics, strict=True):
            for name in metrics:
                assert ours[name] == pytest.approx(theirs[name], rel=1e-5, abs=1e-5), name
    check_weights(expected.weights, joined(ranks))


def check_weights(expected: dict[str, Tensor], weights: dict[str, Tensor]) -> None:
    assert weights.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(weights[name], weight, atol=2e-5, rtol=0, msg=name)


@pytest.mark.covered
@pytest.mark.distributed
@pytest.mark.parametrize("case", PIPELINES, ids=str)
def test_stages_train_as_the_oracle_does(pool_of, model_dirs, oracle, agreed, case):
    ranks = pool_of(case.sizes.num_processes).run(train_parallel, case, *model_dirs(case.family, case.num_layers))
    check_against(oracle(case), ranks)
    agreed(case)


@pytest.mark.distributed
def test_a_coupled_loss_trains_as_in_one_process(two_ranks, model_dirs):
    case = Case(TWO_STAGES, loss="aot", virtual_pp_size=INTERLEAVED)
    alone = train_single_process(case, *model_dirs("llama"))
    check_against(alone, two_ranks.run(train_parallel, case, *model_dirs("llama")), tuple(alone.metrics[0]))


@pytest.mark.distributed
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_losses_in_half_precision_equal_those_of_one_process(two_ranks, model_dirs, dtype):
    case = Case(TWO_STAGES, dtype=dtype)
    alone = train_single_process(case, *model_dirs("llama"))
    for rank in two_ranks.run(train_parallel, case, *model_dirs("llama")):
        losses = [step["loss"] for step in rank.metrics]
        assert losses == pytest.approx([step["loss"] for step in alone.metrics], abs=1e-5)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("sizes", "virtual_pp_size", "assignments"),
    [
        (ParallelDims(pp=4), 1, [[[0, 1, 2, 3]]]),
        (ParallelDims(pp=4), 1, [[[0, 1], [2], [3, 4]]]),
        (ParallelDims(pp=4), 1, [[[0], [1, 2, 3], [4], [5], [6, 7], [8]]]),
        (ParallelDims(pp=2, dp_replicate=2), INTERLEAVED, [[[0, 1, 2]], [[3], [4], [5], [6], [7]]]),
        (ParallelDims(pp=2, dp_replicate=2), 1, [[[0]], []]),
        (ParallelDims(pp=2, dp_shard=2), 1, [[[0, 1], [2]], [[3], []]]),
        (ParallelDims(pp=2, dp_shard=2), 1, [[[0]], [[]]]),
        (ParallelDims(pp=2, dp_shard=2), INTERLEAVED, [[[0]], [[]]]),
    ],
    ids=["one of four", "three of four", "six", "1 and 5", "none", "a rank with fewer", "an empty one", "interleaved"],
)
def test_any_number_of_micro_batches_makes_the_same_step(four_ranks, model_dirs, sizes, virtual_pp_size, assignments):
    path = model_dirs("llama")[0]
    everything = [[ids for assignment in assignments for ids in assignment if ids]]
    alone = one_step(Case(ParallelDims(), loss="simpo"), path, everything)
    ranks = four_ranks.run(one_step, Case(sizes, loss="simpo", virtual_pp_size=virtual_pp_size), path, assignments)
    for rank in ranks:
        assert rank.metrics == pytest.approx(alone.metrics, rel=1e-5, abs=1e-5)
        assert rank.grad_norm == pytest.approx(alone.grad_norm, rel=1e-5)
        assert rank.tokens == alone.tokens  # nothing is padded to a common shape
    check_weights(alone.weights, joined(ranks))


@pytest.mark.distributed
def test_a_stage_holds_only_its_layers(four_ranks, model_dirs):
    ranks = four_ranks.run(partial(train_from_config, model_dirs("qwen2")[0], {"pp_size": 4}, "shared"))
    held = [{name.split(".")[2] for name in rank.weights if ".layers." in name} for rank in ranks]
    assert held == [{"0"}, {"1"}, {"2"}, {"3"}]
    has_embedding = ["model.embed_tokens.weight" in rank.weights for rank in ranks]
    assert has_embedding == [True, False, False, True]  # the last one's head is the same matrix
    assert ["model.norm.weight" in rank.weights for rank in ranks] == [False, False, False, True]


@pytest.mark.skipif(torch.__version__ >= (2, 15), reason="counts buffers that torch itself manages since 2.15")
@pytest.mark.distributed
def test_a_stage_holds_hidden_states_only_of_micro_batches_in_flight(four_ranks, model_dirs):
    case = Case(ParallelDims(pp=4), loss="simpo")
    assert four_ranks.run(max_held_inputs, case, model_dirs("llama")[0], 12) == [0, 3, 2, 1]


@pytest.mark.distributed
@pytest.mark.parametrize("axes", [{"pp_size": 2}, {"pp_size": 2, "virtual_pp_size": 2, "tp_size": 2}], ids=str)
def test_lora_in_stages_trains_as_in_one_process(four_ranks, model_dirs, axes):
    path = model_dirs("llama")[0]
    alone = train_from_config(path, {}, "shared", lora_rank=4)
    ranks = four_ranks.run(partial(train_from_config, path, axes, "shared", lora_rank=4))
    check_against(alone, ranks, tuple(alone.metrics[0]))
    assert alone.metrics[NUM_STEPS - 1]["loss"] != pytest.approx(alone.metrics[0]["loss"], abs=1e-3)


def test_dropout_with_a_loss_that_scores_steps_twice_is_rejected(model_dirs):
    def check(loss: str, dropout: float, **axes: int) -> None:
        config = config_of(model_dirs("llama")[0], 2, axes, lora_rank=4, lora_dropout=dropout)
        check_engine(config.model_copy(update={"pref_loss": loss}), "actor_train")

    with pytest.raises(UserError, match=r"actor_train.model_args.lora_dropout to 0, or .*pp_size to 1"):
        check("aot", 0.1, pp_size=2)
    check("aot", 0.0, pp_size=2)
    check("aot", 0.1, tp_size=2)
    check("kto", 0.1, pp_size=2)


@pytest.mark.distributed
def test_kto_trains_with_dropout_in_stages(two_ranks, model_dirs):
    lora = {"loss": "kto", "lora_rank": 4, "lora_dropout": 0.5}
    path = model_dirs("llama")[0]
    alone = train_from_config(path, {}, "shared", **lora)
    first, last = two_ranks.run(partial(train_from_config, path, {"pp_size": 2}, "shared", **lora))
    assert first.metrics == last.metrics
    assert last.metrics[0] == pytest.approx(alone.metrics[0], abs=1e-5)  # an adapter that starts at 0 changes nothing
    assert all(norm > 0.0 for norm in last.grad_norms)
    assert last.skipped_steps == 0


@pytest.mark.distributed
@pytest.mark.parametrize(
    "case",
    [
        Case(TWO_STAGES),
        Case(TWO_STAGES, "padded"),
        Case(TWO_STAGES, "packed", family="gemma2", virtual_pp_size=INTERLEAVED),
    ],
    ids=str,
)
def test_the_start_up_check_accepts_valid_stages(two_ranks, model_dirs, case):
    assert two_ranks.run(check_logps, case, model_dirs(case.family, case.num_layers)[0], False) == [None, None]


@pytest.mark.distributed
def test_the_start_up_check_compares_the_rewards_of_stages(two_ranks, tmp_path):
    path = save_model(tmp_path / "causal", "llama", seed=0)
    rewards = load_model(str(path), is_reward_model=True)
    torch.nn.init.normal_(rewards.score.weight)
    rewards.config.pad_token_id = 3  # some responses end with it
    rewards.save_pretrained(tmp_path / "rewards")
    for layout, has_wrong_positions in (("shared", False), ("padded", False), ("shared", True)):
        case = Case(TWO_STAGES, layout, loss="bradley_terry")
        for found in two_ranks.run(check_logps, case, tmp_path / "rewards", has_wrong_positions):
            assert (found is not None) == has_wrong_positions, found


@pytest.mark.distributed
def test_the_start_up_check_rejects_wrong_positions_on_every_stage(two_ranks, model_dirs):
    for found in two_ranks.run(check_logps, Case(TWO_STAGES), model_dirs("llama")[0], True):
        assert found is not None
        assert "and of the model's original layers differ by " in found


def test_layers_are_partitioned_evenly_with_extra_layers_in_the_middle():
    assert partition_layers(8, 4) == [range(2), range(2, 4), range(4, 6), range(6, 8)]
    assert [len(part) for part in partition_layers(30, 4)] == [7, 8, 8, 7]
    assert [len(part) for part in partition_layers(7, 2)] == [4, 3]  # the last has the head
    with pytest.raises(UserError, match="3 layers cannot be split into 4 pipeline chunks"):
        partition_layers(3, 4)


@pytest.mark.parametrize(
    "family", ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "mixtral", "gpt_oss"]
)
def test_architectures_that_accept_hidden_states(family):
    check_accepts_hidden_states(tiny_model(family))


@pytest.mark.parametrize(
    ("family", "reason"),
    [("granite", "changes them before"), ("gpt_neox", "no attributes of these"), ("opt", "no attributes of these")],
)
def test_architectures_that_cannot_be_split_into_stages_are_rejected(family, reason):
    with pytest.raises(UserError, match=reason):
        check_accepts_hidden_states(tiny_model(family))
