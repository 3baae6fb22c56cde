"""One optimizer step on a tiny and on a real model: thresher, the oracle and TRL make the same one."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from tests.support.real_pairs import (
    TokenPair,
    micro_batches,
    minimal_dpo,
    objective_of,
    policy_on,
    polite_rows,
    reference_on,
    token_pairs,
)
from tests.support.tiny_chat_model import quickstart_rows
from thresher.models.optimizations.recompute import recompute_activations

BETA = 0.1
# AdamW's first step is lr * g / (|g| + eps): where |g| comes near eps, rounding noise in g moves the weight. At lr 1e-3
# and eps 1e-8 two of the real model's 260,032 weights differ by 3e-5 between any two implementations, and the tiny
# model's by up to 1.1e-5, so each case relaxes one of the two.
DEFAULT_EPSILON, LARGE_STEP = (1e-4, 1e-8), (1e-3, 1e-5)
STEPS = [
    pytest.param("tiny", *DEFAULT_EPSILON, id="default epsilon"),
    pytest.param("tiny", *LARGE_STEP, id="large step"),
]


class Given(NamedTuple):
    """A model and its pairs, as text and as tokens."""

    model_dir: Path
    rows: list[dict[str, str]]
    pairs: list[TokenPair]


@pytest.fixture
def given(request, tiny_dir) -> Given:
    """16 pairs for the made model, or real ones for the real model."""
    if request.param == "real":
        model_dir = request.getfixturevalue("stories_dir")
        rows = polite_rows(request.getfixturevalue("polite_file"), 16)
    else:
        model_dir, rows = tiny_dir, quickstart_rows(16)
    return Given(model_dir, rows, token_pairs(model_dir, rows))


@pytest.fixture(scope="module")
def pairs(tiny_dir) -> list[TokenPair]:
    return token_pairs(tiny_dir, quickstart_rows(16))


def our_step(model_dir, pairs, learning_rate, epsilon):
    policy, reference = policy_on(model_dir, adam_epsilon=epsilon), reference_on(model_dir)
    outcome = policy.train_step(
        micro_batches(pairs, reference, 16),
        objective_of("sigmoid", beta=BETA),
        num_pairs_in_step=len(pairs),
        learning_rate=learning_rate,
    )
    return outcome, policy.weights()


@pytest.mark.parametrize(
    ("given", "learning_rate", "epsilon"),
    [*STEPS, pytest.param("real", *LARGE_STEP, id="real model", marks=pytest.mark.real)],
    indirect=["given"],
)
def test_one_step_equals_the_minimal_oracle(given, learning_rate, epsilon):
    outcome, ours = our_step(given.model_dir, given.pairs, learning_rate, epsilon)
    oracle = minimal_dpo()
    model = reference_on(given.model_dir).model.train()
    reference = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, eps=epsilon, weight_decay=0.0)
    expected = oracle.train_step(model, reference, optimizer, given.pairs, beta=BETA)

    assert outcome.metrics["loss"].mean == pytest.approx(expected["loss"], abs=1e-5)
    assert outcome.grad_norm == pytest.approx(expected["grad_norm"], abs=1e-5)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(ours[name], parameter.detach(), atol=1e-5, rtol=0, msg=name)
    moved = max((ours[name] - weight).abs().max().item() for name, weight in reference.named_parameters())
    assert moved > learning_rate / 2  # the step did something


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "learning_rate", "epsilon"),
    [*STEPS, pytest.param("real", *LARGE_STEP, id="real model", marks=[pytest.mark.real, pytest.mark.hand])],
    indirect=["given"],
)
def test_one_step_equals_trl(given, tmp_path, learning_rate, epsilon):
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    trainer = DPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(given.model_dir, dtype=torch.float32),
        args=DPOConfig(
            output_dir=str(tmp_path),
            per_device_train_batch_size=16,
            max_steps=1,
            learning_rate=learning_rate,
            adam_epsilon=epsilon,
            beta=BETA,
            bf16=False,
            gradient_checkpointing=False,
            logging_steps=1,
            report_to="none",
            save_strategy="no",
            use_cpu=True,
            seed=0,
        ),
        train_dataset=Dataset.from_list(given.rows),
        processing_class=AutoTokenizer.from_pretrained(given.model_dir),
    )
    pairs = [(row["prompt_ids"], row["chosen_ids"], row["rejected_ids"]) for row in trainer.train_dataset]
    trainer.train()
    log = next(record for record in trainer.state.log_history if "loss" in record)
    outcome, ours = our_step(given.model_dir, pairs, learning_rate, epsilon)

    assert outcome.metrics["loss"].mean == pytest.approx(log["loss"], abs=1e-5)
    assert outcome.metrics["logps/chosen"].mean == pytest.approx(log["logps/chosen"], rel=1e-5)
    assert outcome.grad_norm == pytest.approx(log["grad_norm"], rel=1e-4)
    for name, parameter in trainer.model.named_parameters():
        torch.testing.assert_close(ours[name], parameter.detach(), atol=1e-5, rtol=0, msg=name)


def gradients(tiny_dir, pairs, sizes, objective, dtype=torch.float64):
    """The gradient of one step whose micro-batches have these sizes."""
    policy, reference = policy_on(tiny_dir, dtype), reference_on(tiny_dir, dtype)
    batches, start = [], 0
    for size in sizes:
        batches += micro_batches(pairs[start : start + size], reference, size)
        start += size
    metrics, _, _ = policy.accumulate(batches, objective, len(pairs))
    found = {name: p.grad.clone() for name, p in policy.model.named_parameters()}
    return found, {name: metric.mean for name, metric in metrics.items()}


@pytest.mark.covered
@pytest.mark.parametrize("loss", ["sigmoid", "ipo", "simpo", "orpo", "aot", "aot_unpaired"])
@pytest.mark.parametrize("sizes", [(8,) * 2, (4,) * 4, (2,) * 8, (1,) * 16, (7, 5, 3, 1)], ids=str)
def test_accumulation_and_micro_batches_do_not_change_the_gradient(tiny_dir, pairs, loss, sizes):
    objective = objective_of(loss)
    full, full_metrics = gradients(tiny_dir, pairs, (16,), objective)
    split, split_metrics = gradients(tiny_dir, pairs, sizes, objective)
    for name, grad in full.items():
        torch.testing.assert_close(split[name], grad, atol=1e-12, rtol=0, msg=name)
    assert split_metrics == pytest.approx(full_metrics, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("sizes", [(8,) * 2, (4,) * 4, (2,) * 8, (1,) * 16], ids=str)
def test_accumulation_moves_the_fp32_gradient_by_rounding_only(tiny_dir, pairs, sizes):
    """1e-6 of the gradient's norm (11.4 here; measured 1.8e-8 to 2.9e-8): fp32 sums in another order, nothing else."""
    objective = objective_of("sigmoid")
    full, _ = gradients(tiny_dir, pairs, (16,), objective, torch.float32)
    split, _ = gradients(tiny_dir, pairs, sizes, objective, torch.float32)
    norm = torch.cat([grad.flatten() for grad in full.values()]).norm().item()
    for name, grad in full.items():
        torch.testing.assert_close(split[name], grad, atol=1e-6 * norm, rtol=0, msg=name)


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_gradient_checkpointing_does_not_change_the_gradient(tiny_dir, pairs, recompute):
    objective = objective_of("sigmoid")
    plain, _ = gradients(tiny_dir, pairs, (16,), objective)
    policy, reference = policy_on(tiny_dir, torch.float64), reference_on(tiny_dir, torch.float64)
    recompute_activations(policy.model, recompute)
    policy.accumulate(micro_batches(pairs, reference, 16), objective, 16)
    for name, parameter in policy.model.named_parameters():
        torch.testing.assert_close(parameter.grad, plain[name], atol=1e-12, rtol=0, msg=name)


def test_a_step_with_a_non_finite_loss_leaves_weights_and_optimizer_unchanged(tiny_dir, pairs):
    policy, reference = policy_on(tiny_dir), reference_on(tiny_dir)
    batches = micro_batches(pairs, reference, 16)
    batches[0].reference.chosen.values[0] = float("nan")
    before = {name: weight.clone() for name, weight in policy.weights().items()}
    outcome = policy.train_step(batches, objective_of("sigmoid"), num_pairs_in_step=16, learning_rate=1e-3)
    assert outcome.skipped
    for name, weight in policy.weights().items():
        assert torch.equal(weight, before[name]), name
    assert not policy.parameters.optimizer.state


def test_bf16_compute_stays_near_fp32(tiny_dir, pairs):
    from thresher.engines.native.build import infer_engine
    from thresher.models.layouts import PaddedLayout
    from thresher.models.loading.load import load_model

    exact = reference_on(tiny_dir)
    mixed = infer_engine(load_model(str(tiny_dir)), PaddedLayout(pad_id=0), torch.bfloat16)
    (batch,) = micro_batches(pairs, None, 16)
    difference = (mixed.score(batch.pairs).chosen.values - exact.score(batch.pairs).chosen.values).abs()
    assert 0 < difference.mean() < 0.06  # 0.03 measured: a tiny model whose every layer rounds to 8 bits
    assert mixed.score(batch.pairs).chosen.values.dtype == torch.float32
