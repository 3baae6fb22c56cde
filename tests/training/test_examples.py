"""Steps on single labelled responses and on lists, against plain forwards of transformers in fp64."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel

from tests.support.engines.fp64_steps import (
    KTO,
    LAYOUTS,
    gradients,
    kto_gradients,
    models,
    tokens,
    with_mismatched_answers,
)
from tests.support.tiny_chat_model import quickstart_rows, save_tiny_chat_model
from tests.support.tiny_models import VOCAB, tiny_model
from tests.support.tiny_run import noise_labels
from thresher.config import parse_config
from thresher.data.batching.mismatched import MismatchedAnswers, VisitPlan, rotate
from thresher.data.example import Example, ExampleBatch, Response
from thresher.engines.accumulate import MicroBatch, objective_inputs
from thresher.engines.native.build import infer_engine
from thresher.losses import Objective, make_loss
from thresher.losses.pairs import empty_logps
from thresher.pipeline import DPOPipeline

# sums of losses over examples divided by their number: how many examples each micro-batch has
SPLITS = [(6,), (3, 3), (1,) * 6, (4, 1, 1)]


def ranked(counts: Sequence[int] = (4, 2, 3, 2, 4, 3)) -> list[Example]:
    draw = np.random.default_rng(0)
    return [
        Example(tokens(draw, 4), tuple(Response(tokens(draw, 6), value=float(-rank)) for rank in range(count)))
        for count in counts
    ]


def plain_log_ratio(policy: PreTrainedModel, reference: PreTrainedModel, prompt: np.ndarray, ids: np.ndarray) -> Tensor:
    sequence = torch.tensor([[*prompt.tolist(), *ids.tolist()]])
    rows = slice(len(prompt) - 1, -1)

    def logp(model: PreTrainedModel) -> Tensor:
        logits = model(input_ids=sequence, use_cache=False).logits[0, rows]
        return logits.log_softmax(-1).gather(1, torch.from_numpy(ids.astype(np.int64))[:, None]).sum()

    with torch.no_grad():
        expected = logp(reference)
    return logp(policy) - expected


def expected_gradients(loss: Callable[[Callable[..., Tensor]], Tensor]) -> tuple[dict[str, Tensor], float]:
    """The gradient of a loss written with plain forwards."""
    policy, reference = models()
    value = loss(lambda prompt, ids: plain_log_ratio(policy, reference, prompt, ids))
    value.backward()
    found = {name: each.grad for name, each in policy.named_parameters() if each.grad is not None}
    return found, value.item()


# norms compute in fp32 whatever the dtype, and those of packed rows round in another place than transformers'
TOLERANCES = {"padded": 1e-12, "packed": 1e-6, "shared": 1e-6}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-12) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, atol=tolerance, rtol=0, msg=name)


def kto(log_ratio: Callable[..., Tensor]) -> Tensor:
    """Eq. 8 of KTO with beta 0.2, lambda_D 1.3 and lambda_U 0.9."""
    examples = with_mismatched_answers()
    mismatched = [log_ratio(each.prompt_ids, each.responses[1].ids).detach() for each in examples]
    z0 = torch.stack(mismatched).mean().clamp(min=0.0)
    losses = []
    for each in examples:
        advantage = 0.2 * (log_ratio(each.prompt_ids, each.chosen.ids) - z0)
        is_desirable = each.chosen.value == 1.0
        losses.append((1.3 if is_desirable else 0.9) * torch.sigmoid(-advantage if is_desirable else advantage))
    return torch.stack(losses).mean()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_a_step_of_kto_is_the_formula_for_every_micro_batching(layout, split):
    expected, value = expected_gradients(kto)
    whole, _ = gradients(with_mismatched_answers(), KTO, LAYOUTS[layout], (6,))
    found, metrics = gradients(with_mismatched_answers(), KTO, LAYOUTS[layout], split)
    assert_equal(found, whole)
    assert_equal(found, expected, TOLERANCES[layout])
    assert metrics["loss"] == pytest.approx(value, abs=TOLERANCES[layout])


@pytest.mark.distributed
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("num_ranks", "split"), [(2, (3,)), (2, (1, 2)), (4, (1, 1))], ids=str)
def test_a_step_of_kto_is_the_formula_on_any_number_of_ranks(pool_of, num_ranks, split, layout):
    expected, value = expected_gradients(kto)
    for found, metrics in pool_of(num_ranks).run(kto_gradients, layout, split):
        assert_equal(found, expected, TOLERANCES[layout])
        assert metrics["loss"] == pytest.approx(value, abs=TOLERANCES[layout])


def test_a_mismatched_answer_without_scored_tokens_does_not_count():
    """It may be cut before its first scored token, since a mask leaves turns out."""
    examples = with_mismatched_answers()
    own, other = examples[2].responses
    unscored = replace(examples[2], responses=(own, other._replace(mask=np.zeros(len(other.ids), dtype=bool))))
    alone = replace(examples[2], responses=(own,))
    for split in ((6,), (1,) * 6):
        expected, without = gradients([*examples[:2], alone, *examples[3:]], KTO, LAYOUTS["shared"], split)
        found, metrics = gradients([*examples[:2], unscored, *examples[3:]], KTO, LAYOUTS["shared"], split)
        assert metrics["kto/z0"] == pytest.approx(without["kto/z0"], abs=1e-12) != 0.0
        assert_equal(found, expected)


def test_a_micro_batch_without_examples_adds_nothing_to_kto():
    """Ranks of FSDP run the same number of micro-batches."""
    empty = MicroBatch(ExampleBatch(np.zeros(0, dtype=np.int64), ()), empty_logps())
    output = replace(KTO, reference_point=0.5)(objective_inputs(empty.matched, empty_logps()))
    assert output.per_pair.shape == (0,)
    assert all(metric.count == 0 for metric in output.metrics.values())


def plackett_luce(log_ratio: Callable[..., Tensor]) -> Tensor:
    losses = []
    for each in ranked():
        rewards = torch.stack([0.2 * log_ratio(each.prompt_ids, response.ids) for response in each.responses])
        losses.append(-sum(rewards[k] - rewards[k:].logsumexp(0) for k in range(len(rewards))))
    return torch.stack(losses).mean()


def sigmoid_of_all(log_ratio: Callable[..., Tensor]) -> Tensor:
    losses = []
    for each in ranked():
        rewards = [0.2 * log_ratio(each.prompt_ids, response.ids) for response in each.responses]
        pairs = [(i, j) for i in range(len(rewards)) for j in range(i + 1, len(rewards))]
        losses.append(-torch.stack([torch.nn.functional.logsigmoid(rewards[i] - rewards[j]) for i, j in pairs]).mean())
    return torch.stack(losses).mean()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("loss", "formula"), [("plackett_luce", plackett_luce), ("sigmoid", sigmoid_of_all)])
def test_a_step_on_ragged_lists_is_the_formula_in_every_layout(loss, formula, layout):
    expected, value = expected_gradients(formula)
    objective = Objective(((make_loss(loss, {"beta": 0.2}), 1.0),))
    for split in ((6,), (1, 3, 2)):
        found, metrics = gradients(ranked(), objective, LAYOUTS[layout], split)
        assert_equal(found, expected, TOLERANCES[layout])
        assert metrics["loss"] == pytest.approx(value, abs=TOLERANCES[layout])


def test_a_shared_row_computes_the_prompt_of_a_list_once():
    lists = ExampleBatch(np.arange(1), tuple(ranked([4])))
    (example,) = lists.pairs
    shared, packed = (LAYOUTS[name].collate(lists) for name in ("shared", "packed"))
    responses = sum(len(each.ids) - 1 for each in example.responses)
    assert shared.model_inputs["input_ids"].numel() == len(example.prompt_ids) + responses
    assert packed.model_inputs["input_ids"].numel() == 4 * len(example.prompt_ids) + responses


@pytest.mark.parametrize("changed", range(4))
def test_changing_one_response_moves_no_other(changed):
    (example,) = ranked([4])
    model = tiny_model("llama").double()

    def sums(example: Example) -> list[float]:
        engine = infer_engine(model, LAYOUTS["shared"], torch.float64)
        return [side.sums().item() for side in engine.score(ExampleBatch(np.arange(1), (example,))).sides]

    responses = list(example.responses)
    responses[changed] = Response((responses[changed].ids + 1) % VOCAB)
    before, after = sums(example), sums(Example(example.prompt_ids, tuple(responses)))
    assert [math.isclose(one, other, rel_tol=1e-12) for one, other in zip(before, after, strict=True)] == [
        at != changed for at in range(4)
    ]


def test_the_visits_of_a_plan_are_numbered_without_gaps_where_epochs_end_with_a_partial_step():
    plan = VisitPlan(10, seed=0, pairs_per_step=4, num_steps=8)
    assert np.concatenate([plan.pair_ids(step) for step in range(8)]).tolist() == list(range(28))
    assert plan.num_visits == 28


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ("abcd", [3, 0, 1, 2]),
        ("aabb", [2, 3, 0, 1]),
        ("abba", [1, 0, 3, 2]),
        ("abcb", [3, 2, 1, 0]),
        ("aab", [2, 2, 0]),
        ("abaca", [1, 0, 3, 2, 1]),
        ("aaaa", [-1] * 4),
        ("a", [-1]),
    ],
)
def test_a_mismatched_answer_is_that_of_a_different_prompt_and_the_one_before_if_all_differ(prompts, expected):
    assert rotate(np.array([each.encode() * 16 for each in prompts], dtype="V16")).tolist() == expected


@given(st.lists(st.integers(0, 4), min_size=2, max_size=24))
def test_mismatched_answers_are_a_permutation_of_the_answers_wherever_one_exists(numbers):
    prompts = np.array(numbers)
    found = rotate(np.array([bytes([each]) * 16 for each in numbers], dtype="V16"))
    if len(set(numbers)) == 1:
        assert (found == -1).all()
        return
    assert (prompts[found] != prompts).all()
    most = max(map(numbers.count, numbers))
    if 2 * most <= len(numbers):
        assert sorted(found) == list(range(len(numbers)))
    else:  # all answers to rarer prompts, equally often
        uses = np.bincount(found, minlength=len(numbers))[prompts != np.bincount(prompts).argmax()]
        assert uses.max() - uses.min() <= 1


def test_visits_of_several_steps_are_those_of_each_step():
    plan = VisitPlan(10, seed=0, pairs_per_step=4, num_steps=8)
    visits = MismatchedAnswers(noise_labels(10), plan)
    steps = [plan.pair_ids(step) for step in range(8)]
    assert np.asarray(visits.lengths).tolist() == [row for step in steps for row in visits.lengths[step].tolist()]
    for part in (visits.examples_of, visits.others_of, visits.lengths_of):
        of_all = np.concatenate([part(step) for step in steps])
        for order in (np.arange(28), np.random.default_rng(0).permutation(28), np.array([], dtype=np.int64)):
            assert (part(order) == of_all[order]).all()
    for step, ids in enumerate(steps):
        assert visits.examples_of(ids).tolist() == plan.example_ids(step).tolist()
        for example, width in zip(visits.read(ids).pairs, visits.lengths[ids], strict=True):
            assert [len(example.prompt_ids), *(len(each.ids) for each in example.responses)] == width.tolist()


@pytest.mark.parametrize("loss", ["kto", "apo_zero_unpaired"])
def test_loss_and_gradients_are_those_of_trl_in_one_micro_batch(loss, tmp_path):
    from datasets import Dataset
    from trl import KTOConfig, KTOTrainer

    examples = with_mismatched_answers()
    weights = {"desirable_weight": 1.3, "undesirable_weight": 0.9} if loss == "kto" else {}
    policy, reference = (model.float() for model in models())
    tokenizer = AutoTokenizer.from_pretrained(save_tiny_chat_model(tmp_path / "tokenizer"))
    trainer = KTOTrainer(
        policy,
        reference,
        KTOConfig(
            str(tmp_path / "out"),
            loss_type=loss,
            beta=0.2,
            **weights,
            per_device_train_batch_size=len(examples),
            report_to=[],
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            max_length=None,
        ),
        # replaced by the examples below
        train_dataset=Dataset.from_list([{"prompt": "a", "completion": "b", "label": at % 2 == 0} for at in range(6)]),
        processing_class=tokenizer,
    )
    rows = [
        {
            "prompt_ids": each.prompt_ids.tolist(),
            "completion_ids": each.chosen.ids.tolist(),
            "KL_completion_ids": each.responses[1].ids.tolist(),
            "label": each.chosen.value == 1.0,
        }
        for each in examples
    ]
    inputs = trainer.data_collator(rows if loss == "kto" else [{**row, "KL_completion_ids": []} for row in rows])
    expected_loss = trainer.compute_loss(trainer.model.eval(), inputs)
    expected_loss.backward()
    expected = {name: each.grad for name, each in trainer.model.named_parameters() if each.grad is not None}
    if loss == "kto":
        found, metrics = gradients(examples, KTO, LAYOUTS["shared"], (3, 3))
    else:
        alone = [replace(each, responses=each.responses[:1]) for each in examples]
        objective = Objective(((make_loss(loss, {"beta": 0.2}), 1.0),))
        found, metrics = gradients(alone, objective, LAYOUTS["shared"], (6,))
    assert metrics["loss"] == pytest.approx(expected_loss.item(), abs=1e-5)
    assert_equal({name: each.float() for name, each in found.items()}, expected, 1e-5)


@pytest.mark.slow
def test_rows_in_the_format_of_llama_factorys_kto_demo_train_and_separate(tmp_path):
    """Whole conversations with a label, the polite answer of a prompt or the rude one."""
    rows = [
        {
            "messages": [
                {"role": "user", "content": row["prompt"]},
                {"role": "assistant", "content": row["chosen" if at % 2 else "rejected"]},
            ],
            "label": bool(at % 2),
        }
        for at, row in enumerate(quickstart_rows(200))
    ]
    file = tmp_path / "kto_en_demo.json"
    file.write_text(json.dumps(rows))
    values = {
        "output_dir": str(tmp_path / "out"),
        "cache_dir": str(tmp_path / "cache"),
        "pretrain": str(save_tiny_chat_model(tmp_path / "model")),
        "pref_loss": "kto",
        "max_steps": 40,
        "save_strategy": "no",
        "sequence_length": 512,
        "track_with": [],
        "actor_train": {
            "model_args": {"dtype": "fp32"},
            "data_args": {"file_name": str(file), "template": "raw"},
            "training_args": {"learning_rate": 2e-3, "global_batch_size": 16},
        },
        "validation": {"split": 0.2},
        "eval_steps": 40,
    }
    metrics = DPOPipeline(parse_config(values)).run()
    assert metrics["eval/rewards/chosen"] > 0.0 > metrics["eval/rewards/rejected"]
    assert metrics["eval/rewards/margins"] > 0.5
    assert metrics["eval/loss"] < 0.4
