"""The learning rate of each step: hand-derived values, and a length in optimizer steps."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import get_scheduler

from thresher.builders.objective import build_schedule
from thresher.config import parse_config
from thresher.data.batching.plan import make_plan
from thresher.training.lr_schedule import LRSchedule

PEAK = 1e-3


def rates(num_steps: int, **training: object) -> list[float]:
    """The rate of every step of a run, and one past its end."""
    config = parse_config({"actor_train": {"training_args": {"learning_rate": PEAK, **training}}})
    schedule = build_schedule(config, num_steps)
    return [schedule(step) for step in range(num_steps + 1)]


# Ten steps, two of them warm-up: 0 and half the peak. Step s past the warm-up has progress p = (s - 2) / 8.
EXPECTED = {
    "constant_with_warmup": {0: 0.0, 1: 0.5, 2: 1.0, 6: 1.0, 10: 1.0},
    "linear": {0: 0.0, 1: 0.5, 2: 1.0, 3: 7 / 8, 6: 0.5, 9: 1 / 8, 10: 0.0},
    # (1 + cos(pi p)) / 2: p = 1/4 gives cos 45 deg = sqrt(1/2), p = 1/2 gives 0
    "cosine": {0: 0.0, 1: 0.5, 2: 1.0, 4: (1 + math.sqrt(0.5)) / 2, 6: 0.5, 8: (1 - math.sqrt(0.5)) / 2, 10: 0.0},
    # the same, from 1 down to 0.2: 0.2 + 0.8 * cosine
    "cosine_with_min_lr": {0: 0.0, 1: 0.5, 2: 1.0, 6: 0.6, 10: 0.2},
    # (1 - p)^2
    "polynomial": {0: 0.0, 1: 0.5, 2: 1.0, 4: 9 / 16, 6: 1 / 4, 10: 0.0},
    # sqrt(warm-up / s)
    "inverse_sqrt": {0: 0.0, 1: 0.5, 2: 1.0, 8: 0.5, 10: math.sqrt(0.2)},
}
EXTRA = {"cosine_with_min_lr": {"min_lr_ratio": 0.2}, "polynomial": {"lr_power": 2.0}}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_schedule_equals_its_hand_derived_values(name):
    found = rates(10, lr_scheduler_type=name, warmup_steps=2, **EXTRA.get(name, {}))
    for step, multiplier in EXPECTED[name].items():
        assert found[step] == pytest.approx(multiplier * PEAK, rel=1e-12, abs=1e-18), step


@pytest.mark.parametrize("name", ["constant", *EXPECTED])
@pytest.mark.parametrize(("num_steps", "warmup"), [(1, 0), (97, 0), (97, 13), (1000, 999)])
def test_a_schedule_equals_transformers_bitwise(name, num_steps, warmup):
    specific = {"cosine_with_min_lr": {"min_lr_rate": 0.3}, "polynomial": {"lr_end": 0.0, "power": 1.7}}.get(name)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=PEAK)
    theirs = get_scheduler(name, optimizer, warmup, num_steps, scheduler_specific_kwargs=specific).lr_lambdas[0]
    ours = LRSchedule(name, PEAK, warmup, num_steps, min_lr_ratio=0.3, power=1.7)
    assert [ours(step) for step in range(num_steps + 1)] == [PEAK * theirs(step) for step in range(num_steps + 1)]


def test_a_constant_schedule_is_constant():
    assert set(rates(10, lr_scheduler_type="constant")) == {PEAK}


def test_every_schedule_of_the_config_is_tested():
    from thresher.config.roles import SCHEDULES

    assert {*EXPECTED, "constant"} == set(SCHEDULES)


@pytest.mark.parametrize("name", ["linear", "cosine", "polynomial"])
@pytest.mark.parametrize("num_steps", [1, 7, 40])
def test_a_schedule_ends_with_the_run_not_before_and_not_after(name, num_steps):
    found = rates(num_steps, lr_scheduler_type=name)
    assert found[0] == PEAK
    assert all(rate > 0 for rate in found[:-1])
    assert found[-1] == pytest.approx(0.0, abs=1e-18)


def test_the_schedule_counts_optimizer_steps_for_any_micro_batch_size():
    """64 pairs per step, 1,000 pairs, two epochs: ceil(1000 / 64) * 2 = 32 steps, for any micro-batch size."""
    for pairs, accumulation in ((64, 1), (16, 4), (1, 64)):
        sizes = {"per_device_train_batch_size": pairs, "gradient_accumulation_steps": accumulation}
        config = parse_config({"actor_train": {"training_args": {"lr_scheduler_type": "linear", **sizes}}})
        pairs_per_step = config.actor_train.training_args.pairs_per_step(1)
        plan = make_plan(1000, seed=0, pairs_per_step=pairs_per_step, max_steps=None, num_epochs=2)
        assert plan.num_steps == 32
        schedule = build_schedule(config, plan.num_steps)
        assert schedule(16) == pytest.approx(schedule(0) / 2)
        assert schedule(32) == 0.0


@pytest.mark.parametrize(
    ("given", "num_steps", "warmup"),
    [
        ({"warmup_ratio": 0.25}, 40, 10),
        ({"warmup_ratio": 0.1}, 4, 1),  # 0.4
        ({"warmup_ratio": 0.1}, 14, 2),  # 1.4
        ({"warmup_ratio": 0.1}, 16, 2),  # 1.6
        ({"warmup_ratio": 0.0}, 40, 0),
        ({"warmup_steps": 5}, 40, 5),
        ({"warmup_steps": 5}, 4000, 5),
        ({}, 40, 0),
    ],
)
def test_warmup_ratio_is_a_fraction_of_the_run_and_warmup_steps_are_absolute(given, num_steps, warmup):
    found = rates(num_steps, lr_scheduler_type="constant_with_warmup", **given)
    assert found.index(PEAK) == warmup
    assert found[:warmup] == pytest.approx([PEAK * step / warmup for step in range(warmup)])


def test_a_run_of_only_warmup_never_reaches_the_peak():
    assert max(rates(10, warmup_ratio=1.0)[:-1]) == pytest.approx(0.9 * PEAK)
