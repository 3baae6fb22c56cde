"""fp16: a dynamic loss scale as torch.amp.GradScaler's, skipped overflows, and numbers near those of fp32."""

from __future__ import annotations

import json
import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.compared_runs import merge
from tests.support.tiny_run import PairsInMemory, TinyRun, build_run, noise_pairs
from thresher.checkpoint.json_io import load_json
from thresher.config.roles import TrainingArgs
from thresher.engines.accumulate import MicroBatch
from thresher.engines.engine import StepOutcome, TrainEngine
from thresher.engines.native.build import infer_engine, train_engine
from thresher.engines.nonfinite import LossScale
from thresher.errors import UserError
from thresher.losses.objective import Objective
from thresher.losses.registry import make_losses
from thresher.models.layouts import PackedLayout, PaddedLayout
from thresher.models.loading.load import load_model

PAIRS = noise_pairs(12)
TOO_LARGE = 2.0**40


@pytest.fixture
def fp16(different_reference) -> dict[str, Any]:
    return merge(different_reference, {"async_save": False, "actor_train": {"model_args": {"dtype": "fp16"}}})


def scaled(power: int, **training_args: Any) -> dict[str, Any]:
    return {"actor_train": {"training_args": {"initial_scale_power": power, **training_args}}}


def policy_of(
    models: tuple[Path, Path], dtype=torch.float16, layout=None, initial_loss_scale: float = 2.0**16
) -> TrainEngine:
    power = int(math.log2(initial_loss_scale))
    optimizer = TrainingArgs(learning_rate=1e-3, adam_epsilon=1e-5, initial_scale_power=power)
    return train_engine(load_model(str(models[0])), layout or PackedLayout(shares_prompt=True), dtype, optimizer)


def batches_of(models: tuple[Path, Path]) -> list[MicroBatch]:
    """Three steps of 4 pairs; the reference is in fp32 and has other weights than the policy."""
    reference = infer_engine(load_model(str(models[1])), PackedLayout(shares_prompt=True), torch.float32)
    read = [PAIRS.read(np.arange(start, start + 4)) for start in (0, 4, 8)]
    return [MicroBatch(pairs, reference.score(pairs)) for pairs in read]


def objective_of(loss: str = "sigmoid") -> Objective:
    return Objective(terms=((make_losses([loss], {"beta": 0.1})[0], 1.0),))


def step(policy: TrainEngine, micro: MicroBatch, loss: str = "sigmoid") -> StepOutcome:
    return policy.train_step([micro], objective_of(loss), num_pairs_in_step=len(micro.pairs), learning_rate=1e-3)


def state_of(policy: TrainEngine) -> dict[str, torch.Tensor]:
    """Weights, moments and the loss scale."""
    state = policy.parameters.optimizer.state_dict()["state"]
    moments = {f"{at}/{name}": value for at, values in state.items() for name, value in values.items()}
    scale = torch.tensor(list(policy.scaler.state().values()), dtype=torch.float64)
    return {**policy.weights(), **moments, "loss scale": scale}


def assert_bitwise_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def records(run: TinyRun) -> list[dict[str, Any]]:
    file = Path(run.config.output_dir) / "logs" / "skipped_steps.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_the_scale_follows_grad_scaler():
    """60 steps, a third of which overflow, with a window of 3."""
    parameter = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    theirs, ours = torch.amp.GradScaler("cpu", growth_interval=3), LossScale(window=3)
    assert ours.value == theirs.get_scale() == 65536
    assert LossScale().window == torch.amp.GradScaler("cpu").get_growth_interval() == 2000
    for overflows in np.random.default_rng(0).random(60) < 1 / 3:
        parameter.grad = torch.full_like(parameter, torch.inf if overflows else 1.0)
        theirs.scale(torch.ones(()))
        theirs.step(optimizer)
        theirs.update()
        assert ours.after_step("gradient" if overflows else None) == ("overflow" if overflows else None)
        assert ours.value == theirs.get_scale()
        assert ours.steps == theirs._get_growth_tracker()


def test_the_window_of_the_scale_continues_after_a_resume():
    """Three steps of a window of 4, then one in the resumed run."""
    stopped, resumed = LossScale(2.0**10, window=4), LossScale(window=4)
    for _ in range(3):
        stopped.after_step(None)
    resumed.load(stopped.state())
    assert (resumed.value, resumed.steps) == (2.0**10, 3)
    resumed.after_step(None)
    assert (resumed.value, resumed.steps) == (2.0**11, 0)


def test_an_overflow_at_the_minimum_scale_is_a_failure():
    scale = LossScale(value=2.0)
    assert [scale.after_step("gradient") for _ in range(3)] == ["overflow", "gradient", "gradient"]
    assert scale.value == 1.0


def test_a_non_finite_loss_is_a_failure_and_keeps_the_scale(models):
    policy, (first, *_) = policy_of(models), batches_of(models)
    first.reference.chosen.values[0] = torch.nan
    outcome = step(policy, first)
    assert outcome.failed
    assert outcome.nonfinite.reason == "loss"
    assert list(outcome.nonfinite.pairs) == [0]
    assert policy.scaler.state() == {"value": 65536.0, "steps": 0}  # not a step of the window either


def test_steps_after_overflows_equal_a_run_that_starts_with_the_final_scale(models):
    batches = batches_of(models)
    policy = policy_of(models, initial_loss_scale=TOO_LARGE)
    before = {name: value.clone() for name, value in state_of(policy).items()}
    overflows = 0
    while (outcome := step(policy, batches[0])).skipped:
        assert not outcome.failed
        assert not math.isfinite(outcome.grad_norm)
        overflows += 1
        assert policy.loss_scale == outcome.nonfinite.loss_scale == TOO_LARGE / 2**overflows
        now = state_of(policy)
        assert_bitwise_equal({name: now[name] for name in policy.weights()}, {n: before[n] for n in policy.weights()})
        assert not policy.parameters.optimizer.state
    assert 5 < overflows < 30
    other = policy_of(models, initial_loss_scale=policy.loss_scale)
    assert not step(other, batches[0]).skipped
    for micro in batches[1:]:
        assert step(policy, micro) == step(other, micro)
    assert_bitwise_equal(state_of(policy), state_of(other))


@pytest.mark.parametrize("loss", ["sigmoid", "aot"])
@pytest.mark.parametrize("layout", [PackedLayout(shares_prompt=True), PaddedLayout(pad_id=0)], ids=["shared", "padded"])
def test_three_steps_stay_near_fp32(models, layout, loss):
    """Loss, gradient norm and logps within 2e-3, relative above 1; fp16 has 11 bits and the model two layers."""
    mixed, exact = policy_of(models, layout=layout), policy_of(models, torch.float32, layout)
    for micro in batches_of(models):
        ours, expected = step(mixed, micro, loss), step(exact, micro, loss)
        assert not ours.skipped
        assert ours.grad_norm == pytest.approx(expected.grad_norm, rel=2e-3)
        for name in ("loss", "logps/chosen", "logps/rejected"):
            assert ours.metrics[name].mean == pytest.approx(expected.metrics[name].mean, rel=2e-3, abs=2e-3)
        assert ours.metrics["loss"].mean != expected.metrics["loss"].mean
    assert exact.loss_scale is None


def test_a_small_scale_loses_gradients_that_the_default_keeps(models):
    """Without a loss scale, gradients below 6e-8 round to 0 in fp16: here those of a loss with a weight of 1e-5."""
    micro = batches_of(models)[0]
    weighted = Objective(terms=((make_losses(["sigmoid"], {"beta": 0.1})[0], 1e-5),))

    def gradients(dtype: torch.dtype, scale: float) -> torch.Tensor:
        policy = policy_of(models, dtype, initial_loss_scale=scale)
        policy.accumulate([micro], weighted, 4)
        return torch.cat([p.grad.flatten() / (policy.loss_scale or 1.0) for p in policy.model.parameters()])

    exact = gradients(torch.float32, 1.0)
    error = {scale: (gradients(torch.float16, scale) - exact).norm() / exact.norm() for scale in (1.0, 2.0**16)}
    assert error[2.0**16] < 5e-3
    assert error[1.0] > 0.05


def test_overflows_neither_end_a_run_nor_warn_and_are_recorded(fp16, caplog):
    run = build_run(merge(fp16, {"max_consecutive_skipped_steps": 1, **scaled(64)}), PAIRS)
    before = {name: weight.clone() for name, weight in run.trainer.engine.weights().items()}
    with caplog.at_level(logging.INFO):
        run.fit()
    assert_bitwise_equal(before, dict(run.trainer.engine.weights()))
    assert records(run) == [
        {
            "step": at,
            "reason": "overflow",
            "grad_norm": "nan",
            "in_a_row": 0,
            "loss_scale": 2.0 ** (64 - at),
            "pairs": [],
        }
        for at in range(1, 7)
    ]
    assert [metrics["loss_scale"] for _, metrics in run.log.records] == [2.0 ** (64 - at) for at in range(1, 7)]
    assert run.trainer.state.skipped_steps == 6
    messages = [(record.levelname, record.message) for record in caplog.records if "skipped" in record.message]
    assert messages[0] == ("INFO", f"step 1 skipped: its gradient overflows fp16; the loss scale is now {2**63:g}")
    assert {level for level, _ in messages} == {"INFO"}


def test_overflows_at_the_minimum_scale_end_a_run(fp16):
    """A gradient of 1e30 overflows fp16 at every scale."""
    pairs = PairsInMemory([replace(pair, weight=1e30) for pair in PAIRS.pairs])
    run = build_run(merge(fp16, {"max_consecutive_skipped_steps": 2, **scaled(1)}), pairs)
    with pytest.raises(UserError, match="in 2 steps in a row, up to step 3"):
        run.fit()
    assert [(record["reason"], record["in_a_row"], record["loss_scale"]) for record in records(run)] == [
        ("overflow", 0, 1.0),
        ("gradient", 1, 1.0),
        ("gradient", 2, 1.0),
    ]


def test_the_window_reaches_the_scale(fp16):
    run = build_run(merge(fp16, scaled(4, loss_scale_window=2)), PAIRS)
    run.fit()
    assert [metrics["loss_scale"] for _, metrics in run.log.records] == [16, 32, 32, 64, 64, 128]


def test_other_precisions_log_and_save_no_scale(different_reference):
    run = build_run(
        merge(different_reference, {"async_save": False, "actor_train": {"model_args": {"dtype": "bf16"}}}), PAIRS
    )
    run.trainer.training_step()
    assert "loss_scale" not in run.trainer._pop_metrics()
    assert load_json(run.trainer.save() / "optimizer.json").keys() == {"type", "groups", "values"}


def test_a_stopped_run_resumes_bitwise_also_just_after_an_overflow(fp16, tmp_path):
    values = merge(fp16, {"num_train_epochs": 7, "save_total_limit": 100, **scaled(28, loss_scale_window=3)})
    whole = build_run(merge(values, {"output_dir": str(tmp_path / "whole")}), PAIRS)
    overflows, scales, checkpoints = [], [], []
    for _ in range(whole.trainer.plan.num_steps):
        whole.trainer.training_step()
        overflows.append(whole.trainer.skipped is not None)
        scales.append(whole.trainer.engine.loss_scale)
        checkpoints.append(whole.trainer.save())
    last_overflow = len(overflows) - 1 - overflows[::-1].index(True)
    # from just after the first, the last of the first series, and the last overflow, and from the middle of a window
    stops = {0, overflows.index(False) - 1, overflows.index(False) + 1, last_overflow}
    assert overflows[0]
    assert len(stops) == 4, overflows
    for stop in stops:
        resumed = build_run(merge(values, {"output_dir": str(tmp_path / f"resumed-{stop}")}), PAIRS)
        resumed.trainer.resume(checkpoints[stop])
        # of every step: a later overflow can make different scales equal again, and all of them give the same weights
        for scale in scales[stop + 1 :]:
            resumed.trainer.training_step()
            assert resumed.trainer.engine.loss_scale == scale
        assert_bitwise_equal(state_of(resumed.trainer.engine), state_of(whole.trainer.engine))
        assert resumed.trainer.state == whole.trainer.state


def test_a_checkpoint_without_a_scale_resumes_with_the_initial_one(fp16, different_reference, tmp_path):
    exact = build_run(merge(different_reference, {"async_save": False}), PAIRS)
    exact.trainer.training_step()
    checkpoint = exact.trainer.save()
    mixed = build_run(merge(fp16, {"output_dir": str(tmp_path / "mixed"), **scaled(12)}), PAIRS)
    mixed.trainer.engine.load(checkpoint)
    assert mixed.trainer.engine.loss_scale == 4096
    assert_bitwise_equal(dict(mixed.trainer.engine.weights()), dict(exact.trainer.engine.weights()))
