"""Steps with a deliberately poisoned pair are skipped, the pair is logged, and nothing else changes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from tests.support.compared_runs import merge
from tests.support.tiny_models import replace_side
from tests.support.tiny_run import PairsInMemory, TinyRun, build_run, noise_labels, noise_pairs
from thresher.data.store.arrow_schema import hash_example
from thresher.errors import UserError

POISONED, TOKEN = 5, 2  # a pair id, and a token that random pairs do not contain
LORA = {"actor_train": {"model_args": {"lora_rank": 2, "lora_alpha": 4}}}
# the largest fp32 number is 3.403e38
HUGE, TOO_LARGE_TO_SQUARE = 3.4e38, 1e30


def with_tokens(pairs: PairsInMemory, side: int, ids: list[int]) -> PairsInMemory:
    """The same pairs with other tokens on one side of the poisoned one."""
    changed = list(pairs.pairs)
    changed[POISONED] = replace_side(changed[POISONED], side, ids=np.array(ids, dtype=np.int32))
    return PairsInMemory(changed)


def with_pair(pairs: PairsInMemory, **changes: Any) -> PairsInMemory:
    """The same pairs with changes to the poisoned one."""
    changed = [replace(pair, **changes) if at == POISONED else pair for at, pair in enumerate(pairs.pairs)]
    return PairsInMemory(changed)


@pytest.fixture(scope="module")
def model_with_a_nan(models, tmp_path_factory) -> Path:
    """The embedding of one token is NaN, as after a torn write or a bad merge."""
    model = LlamaForCausalLM.from_pretrained(models[0])
    with torch.no_grad():
        model.model.embed_tokens.weight[TOKEN] = torch.nan
    path = tmp_path_factory.mktemp("nan") / "policy"
    model.save_pretrained(path)
    return path


def steps_with_the_pair(run: TinyRun) -> list[int]:
    plan = run.trainer.plan
    return [step for step in range(plan.num_steps) if POISONED in plan.pair_ids(step)]


def records(run: TinyRun) -> list[dict[str, Any]]:
    file = Path(run.config.output_dir) / "logs" / "skipped_steps.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()]


def weights_of(run: TinyRun) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in run.trainer.engine.weights().items()}


@pytest.mark.parametrize("adapter", [{}, LORA], ids=["all weights", "lora"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("poison", ["policy logps", "loss", "gradient"])
def test_steps_with_a_poisoned_pair_are_skipped_and_all_others_made(
    different_reference, model_with_a_nan, poison, dtype, adapter
):
    valid = noise_pairs(12)
    values = merge(merge(different_reference, adapter), {"actor_train": {"model_args": {"dtype": dtype}}})
    if poison == "policy logps":
        valid = with_tokens(valid, 1, [7, TOKEN, 9])
        values = merge(values, {"pretrain": str(model_with_a_nan)})
        pairs = valid
    else:
        # 3.4e38 times a loss above 1 is infinite; 1e30 times any loss is not, but the norm of its gradient is
        of_pair = {"weight": HUGE, "margin": 20.0} if poison == "loss" else {"weight": TOO_LARGE_TO_SQUARE}
        pairs = with_pair(valid, **of_pair)
    run = build_run(values, pairs)
    poisoned_steps = steps_with_the_pair(run)
    assert len(poisoned_steps) == 2  # one in each epoch
    run.fit()

    step = poisoned_steps[0]
    first, second = records(run)
    assert [first["step"], second["step"]] == [number + 1 for number in poisoned_steps]
    content = hash_example(pairs.pairs[POISONED]).pair.hex()
    if poison == "gradient":
        assert first["reason"] == "gradient"
        # a gradient is not attributable to one pair
        assert [pair["pair"] for pair in first["pairs"]] == run.trainer.plan.pair_ids(step).tolist()
        assert {pair["fault"] for pair in first["pairs"]} == {"not known"}
        assert content in [pair["hash"] for pair in first["pairs"]]
        assert first["grad_norm"] == "inf"
    else:
        assert first["reason"] == "loss"
        assert first["pairs"] == [{"pair": POISONED, "hash": content, "fault": poison}]
    assert run.trainer.state.skipped_steps == 2
    assert [metrics["skipped_steps"] for _, metrics in run.log.records][-1] == 2

    # a run that only counts those steps is bitwise the same: weights, moments and schedule
    other = build_run(merge(values, {"output_dir": values["output_dir"] + "-other"}), valid)
    for number in range(other.trainer.plan.num_steps):
        if number in poisoned_steps:
            other.trainer.state.step += 1
        else:
            other.trainer.training_step()
    moments, expected = (each.trainer.engine.parameters.optimizer.state_dict()["state"] for each in (run, other))
    assert moments.keys() == expected.keys()
    assert all(torch.equal(moments[at][name], value) for at in expected for name, value in expected[at].items())
    ours, theirs = weights_of(run), weights_of(other)
    assert ours.keys() == theirs.keys()
    for name, weight in theirs.items():
        torch.testing.assert_close(ours[name], weight, rtol=0, atol=0, equal_nan=True, msg=name)


def test_non_finite_reference_logps_are_reported_as_the_cause(base, models, model_with_a_nan):
    pairs = with_tokens(noise_pairs(12), 0, [TOKEN, 7, 8])
    reference = {"reference": {"model_args": {"model_name_or_path": str(model_with_a_nan)}, "infer_batch_size": 1}}
    run = build_run(merge(base, reference), pairs)
    run.fit()
    assert [[(pair["pair"], pair["fault"]) for pair in record["pairs"]] for record in records(run)] == [
        [(POISONED, "reference logps")]
    ] * 2


def test_a_coupled_loss_names_only_the_pair_with_non_finite_logps(different_reference, model_with_a_nan):
    pairs = with_tokens(noise_pairs(12), 1, [7, TOKEN, 9])
    run = build_run(merge(different_reference, {"pretrain": str(model_with_a_nan), "pref_loss": "aot"}), pairs)
    run.fit()
    assert [[(pair["pair"], pair["fault"]) for pair in record["pairs"]] for record in records(run)] == [
        [(POISONED, "policy logps")]
    ] * 2


def test_kto_names_the_example_and_the_one_that_its_answer_stands_next_to(different_reference, model_with_a_nan):
    """Every loss of the step contains the reference point, and so is NaN."""
    pairs = with_tokens(noise_labels(12), 0, [7, TOKEN, 9]).pairs
    # a long one, so that no mismatched answer is cut
    labels = PairsInMemory([replace_side(pairs[0], 0, ids=np.arange(3, 20, dtype=np.int32)), *pairs[1:]])
    run = build_run(merge(different_reference, {"pretrain": str(model_with_a_nan), "pref_loss": "kto"}), labels)
    visits = run.trainer._train
    steps = [step for step in range(4) if POISONED in visits.plan.example_ids(step)]
    run.fit()
    expected = []
    for step in steps:
        ids = visits.plan.pair_ids(step)
        (other,) = visits.examples_of(ids[visits.others_of(ids) == POISONED]).tolist()
        faults = {POISONED: "policy logps", other: "policy logps of the mismatched answer"}
        expected.append({at: (hash_example(labels.pairs[at]).pair.hex(), fault) for at, fault in faults.items()})
    assert [{each["pair"]: (each["hash"], each["fault"]) for each in record["pairs"]} for record in records(run)] == (
        expected
    )


def test_a_loss_that_does_not_couple_pairs_names_pairs_of_both_faults(different_reference, model_with_a_nan):
    """Every step has all 12 pairs: one with NaN logps, and one with finite logps and an infinite loss."""
    pairs = with_tokens(noise_pairs(12), 1, [7, TOKEN, 9])
    pairs.pairs[POISONED + 1] = replace(pairs.pairs[POISONED + 1], weight=HUGE, margin=20.0)
    changes = {"actor_train": {"training_args": {"per_device_train_batch_size": 12}}}
    run = build_run(merge(merge(different_reference, {"pretrain": str(model_with_a_nan)}), changes), pairs)
    run.fit()
    assert [{pair["pair"]: pair["fault"] for pair in record["pairs"]} for record in records(run)] == [
        {POISONED: "policy logps", POISONED + 1: "loss"}
    ] * 2


def test_too_many_consecutive_skipped_steps_end_the_run_and_name_the_log(different_reference):
    pairs = PairsInMemory([replace(pair, weight=HUGE, margin=20.0) for pair in noise_pairs(12).pairs])
    run = build_run(merge(different_reference, {"max_consecutive_skipped_steps": 2}), pairs)
    with pytest.raises(UserError, match=r"in 2 steps in a row, up to step 2; .* listed in .*skipped_steps\.jsonl,"):
        run.fit()
    assert [record["in_a_row"] for record in records(run)] == [1, 2]
    assert [len(record["pairs"]) for record in records(run)] == [4, 4]
    assert run.trainer.state.step == 2


def test_a_completed_step_resets_the_count_of_skipped_steps(different_reference):
    pairs = with_pair(noise_pairs(12), weight=HUGE, margin=20.0)
    run = build_run(merge(different_reference, {"max_consecutive_skipped_steps": 2, "num_train_epochs": 4}), pairs)
    run.fit()
    assert [record["in_a_row"] for record in records(run)] == [1] * 4


def test_a_skipped_step_adds_no_pairs_and_no_tokens(different_reference):
    """12 pairs in steps of 4: one step of three is skipped in each of two epochs."""
    run = build_run(different_reference, with_pair(noise_pairs(12), weight=HUGE, margin=20.0))
    run.fit()
    plan, skipped = run.trainer.plan, steps_with_the_pair(run)
    made = [plan.pair_ids(step) for step in range(plan.num_steps) if step not in skipped]
    trained = [noise_pairs(12).pairs[at] for at in np.concatenate(made)]
    assert run.trainer.state.pairs_seen == len(trained) == 16
    num_tokens = [2 * len(each.prompt_ids) + sum(len(side.ids) for side in each.responses) for each in trained]
    assert run.trainer.state.useful_tokens_seen == sum(num_tokens)


def test_a_skipped_step_is_one_line_with_the_reason_and_the_pairs(different_reference, caplog):
    run = build_run(different_reference, with_pair(noise_pairs(12), weight=HUGE, margin=20.0))
    run.fit()
    log = Path(run.config.output_dir) / "logs" / "skipped_steps.jsonl"
    assert caplog.messages == [
        f"step {step + 1} skipped: its loss is not finite (pair {POISONED}); see {log}"
        for step in steps_with_the_pair(run)
    ]


def test_a_run_without_skipped_steps_writes_no_log_of_them(different_reference):
    run = build_run(different_reference, noise_pairs(12))
    run.fit()
    assert not (Path(run.config.output_dir) / "logs" / "skipped_steps.jsonl").exists()
