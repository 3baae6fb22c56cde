"""Each health rule fires on a run that has its fault and on no other, at any logging interval."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import pytest

from tests.support.health_replay import replay
from thresher.config.loss import LOSS_PARAMETERS
from thresher.observability.health import rules
from thresher.observability.health.history import History, pairs_before_comparison
from thresher.observability.health.monitor import REARM_RECORDS, RuleEngine
from thresher.observability.health.rules import RULES, Rule

REFUSABLE = {"rpo_alpha", "length_penalty", "ld_alpha", "length_normalization", "pref_loss", *LOSS_PARAMETERS}
STEPS, PAIRS, VALIDATION_PAIRS = 200, 16, 100
FACTS = History(
    total_steps=STEPS,
    num_training_pairs=1000,
    duplicates=10,
    initial_loss=math.log(2),
    starts_at_reference=True,
    logp_noise=1e-3,
    num_validation_pairs=VALIDATION_PAIRS,
    refused=frozenset({"desirable_weight"}),  # a parameter of losses on labels
)
Metrics = dict[str, float]
Fault = Callable[[float, Metrics], Mapping[str, float]]


def healthy(seed: int = 0, steps: int = STEPS) -> list[Metrics]:
    """A run that learns: the means move as in the runs of docs/internals/results.md, with the noise of 16 pairs."""
    draw = np.random.default_rng(seed)
    records = []
    for step in range(1, steps + 1):
        progress = (step - 1) / steps
        accuracy = 0.5 + 0.35 * min(1.0, 3 * progress)
        longer = 0.55
        prefers_longer = accuracy * longer + (1 - accuracy) * (1 - longer)
        margin = 1.5 * progress
        records.append(
            {
                "step": step,
                "pairs_seen": step * PAIRS,
                "loss": math.log(2) - 0.35 * progress + draw.normal(0, 0.05) * (step > 1),
                "rewards/accuracies": draw.binomial(PAIRS, accuracy) / PAIRS,
                "rewards/margins": margin + draw.normal(0, 0.2) * (step > 1),
                "sft_loss": 1.9 + 0.1 * progress + draw.normal(0, 0.15),
                "lengths/chosen": 20 + draw.normal(0, 2),
                "lengths/rejected": 22 + draw.normal(0, 2),
                "lengths/longer_chosen": draw.binomial(PAIRS, longer) / PAIRS,
                "lengths/longer_preferred": draw.binomial(PAIRS, prefers_longer) / PAIRS,
                "kl": -10 * progress + draw.normal(0, 1) * (step > 1),
                "entropy": 1.8 - 0.2 * progress + draw.normal(0, 0.08),
                "grad_norm": 2.0 * math.exp(draw.normal(0, 0.4)),
                "lr": 1e-6,
                # means over 16 answers at temperature 1
                "samples/repetition/policy": 0.08 + 0.05 * progress + draw.normal(0, 0.03),
                "samples/repetition/reference": 0.08,
                "eval/loss": math.log(2) - 0.2 * progress + draw.normal(0, 0.03),
                "eval/rewards/accuracies": draw.binomial(VALIDATION_PAIRS, 0.5 + 0.2 * progress) / VALIDATION_PAIRS,
                "eval/rewards/margins": 0.8 * progress + draw.normal(0, 0.05),
            }
        )
    return records


def in_intervals(records: list[Metrics], every: int) -> list[Metrics]:
    """The log of the same run with another logging_steps: means of each interval, but the last gradient norm."""
    parts = [records[start : start + every] for start in range(0, len(records), every)]
    last_values = ("step", "pairs_seen", "grad_norm", "lr")
    return [
        {
            name: part[-1][name] if name in last_values else float(np.mean([each[name] for each in part]))
            for name in part[0]
        }
        for part in parts
    ]


def with_fault(records: list[Metrics], fault: Fault) -> list[Metrics]:
    return [record | fault(record["step"] / STEPS, record) for record in records]


def spike(_: float, record: Metrics) -> Mapping[str, float]:
    return {"grad_norm": 300.0} if record["step"] in (120, 130, 140) else {}


# the rule, the change of a healthy run that it must find, and what is known of the run before its first step
FAULTS: dict[str, tuple[Fault, History]] = {
    "likelihood_displacement": (lambda t, record: {"sft_loss": record["sft_loss"] + 1.1 * t}, FACTS),
    "length_exploitation": (lambda t, _: {"lengths/longer_preferred": 0.55 + 0.4 * t}, FACTS),
    "large_kl": (lambda t, record: {"kl": record["kl"] - 60 * t * (t > 0.1)}, FACTS),
    "entropy_collapse": (lambda t, record: {"entropy": record["entropy"] * (1 - 0.7 * t)}, FACTS),
    "saturated_rewards": (
        lambda t, _: {"rewards/accuracies": 1.0, "loss": 0.02, "rewards/margins": 8.0} if t > 0.5 else {},
        FACTS,
    ),
    "chance_accuracy": (lambda _, record: {"rewards/accuracies": 0.5 + 0.06 * (-1) ** record["step"]}, FACTS),
    "initial_loss": (lambda _, record: {"loss": 1.2} if record["step"] == 1 else {}, FACTS),
    "mismatched_reference": (lambda _, record: {"kl": -2.0} if record["step"] == 1 else {}, FACTS),
    "gradient_spikes": (spike, FACTS),
    "repetition": (lambda t, _: {"samples/repetition/policy": 0.1 + 0.6 * t}, FACTS),
    "validation_below_chance": (
        lambda t, _: {"eval/rewards/accuracies": 0.5 - 0.4 * t, "eval/rewards/margins": -1.2 * t},
        FACTS,
    ),
    "overfitting": (lambda t, _: {"eval/loss": 0.65 + 0.8 * max(0.0, t - 0.3)}, FACTS),
    "repeated_data": (lambda *_: {}, History(STEPS, num_training_pairs=1000, duplicates=80)),
}


def test_every_rule_has_a_fault():
    assert FAULTS.keys() == {rule.name for rule in RULES}


@pytest.mark.parametrize("name", FAULTS)
def test_a_rule_fires_once_on_its_fault_and_no_other_rule_does(name):
    fault, known = FAULTS[name]
    events = list(replay(known, with_fault(healthy(), fault)))
    assert [event.rule for event in events] == [name]
    assert all(math.isfinite(value) for value in events[0].evidence.values())


@pytest.mark.parametrize("seed", range(20))
def test_noise_fires_no_rule(seed):
    assert list(replay(FACTS, healthy(seed, steps=400))) == []


@pytest.mark.parametrize("every", [5, 20])
@pytest.mark.parametrize("name", sorted(FAULTS.keys() - {"initial_loss", "mismatched_reference", "gradient_spikes"}))
def test_the_verdict_does_not_depend_on_logging_steps(name, every):
    fault, known = FAULTS[name]
    assert [event.rule for event in replay(known, in_intervals(with_fault(healthy(), fault), every))] == [name]
    assert list(replay(FACTS, in_intervals(healthy(), every))) == []


def test_the_run_that_lost_london_is_caught_and_a_run_with_less_drift_is_not():
    """Evaluations of docs/internals/results.md as training records, 16 pairs a step and logging_steps 5.

    Chosen responses have 17.7 tokens on average: -28.2 nats at the start are 1.59 per token, -45.6 at the end 2.58.
    """
    steps = np.array([0, 24, 48, 72])
    tokens = 17.7

    def records(chosen, margin) -> list[Metrics]:
        return [
            {
                "step": step,
                "pairs_seen": step * 16,
                "loss": 0.5,
                "sft_loss": -float(np.interp(step, steps, chosen)) / tokens,
                "rewards/margins": float(np.interp(step, steps, margin)),
            }
            for step in range(5, 73, 5)
        ]

    known = History(total_steps=72, num_training_pairs=985)
    (event,) = replay(known, records([-28.2, -33.8, -42.3, -45.6], [0.0, 1.48, 2.43, 2.52]))
    assert event.rule == "likelihood_displacement"
    assert event.step <= 50  # before the last third of the run
    assert "rpo_alpha" in event.advice
    # the pilot at learning rate 2e-5: chosen fell by 4.2 nats
    assert list(replay(known, records([-28.2, -29.6, -31.0, -32.4], [0.0, 0.5, 1.0, 1.47]))) == []


def test_a_run_without_a_reference_has_no_rule_that_needs_one():
    missing = {"kl", "entropy"}
    records = [{name: value for name, value in record.items() if name not in missing} for record in healthy()]
    assert list(replay(History(STEPS, num_training_pairs=1000), records)) == []
    displaced = with_fault(records, FAULTS["likelihood_displacement"][0])
    assert [each.rule for each in replay(History(STEPS, 1000), displaced)] == ["likelihood_displacement"]


def test_supervised_fine_tuning_is_not_measured_by_preferences():
    records = with_fault(healthy(), FAULTS["chance_accuracy"][0])
    assert list(replay(History(STEPS, num_training_pairs=1000, compares_sides=False), records)) == []


@pytest.mark.parametrize(
    ("chosen", "preferred", "fires"),
    [(0.9, 0.9, False), (0.55, 0.75, True), (0.3, 0.5, False), (0.45, 0.25, True), (0.7, 0.5, False)],
    ids=["as in the data", "longer", "chance, short data", "shorter", "chance, long data"],
)
def test_a_preference_for_a_length_is_one_beyond_the_data_and_beyond_chance(chosen, preferred, fires):
    history = replace(FACTS)
    for record in healthy():
        history.add(
            int(record["step"]), record | {"lengths/longer_chosen": chosen, "lengths/longer_preferred": preferred}
        )
    assert (rules.length_exploitation(history) is not None) == fires


def test_an_accuracy_window_that_begins_during_the_warm_up_is_not_judged():
    """The policy learns from step 91 on; any 64 steps before that, 1,024 pairs, begin in the first 40 of 200."""
    late = with_fault(healthy(), lambda _, record: {"rewards/accuracies": 0.5 if record["step"] <= 90 else 0.95})
    assert list(replay(FACTS, late)) == []


def test_the_newest_window_shares_no_record_with_the_first():
    """Records of 64 pairs: the first window is steps 1 to 4, so the first one to compare with it is steps 5 to 8."""
    history, windows = replace(FACTS), []
    for step in range(1, 9):
        history.add(step, {"loss": 1.0, "pairs_seen": 64 * step})
        window = history.recent()
        windows.append(window and [record.step for record in window.records])
    assert [record.step for record in history.first.records] == [1, 2, 3, 4]
    assert windows == [None] * 7 + [[5, 6, 7, 8]]


def test_a_spike_after_the_first_ten_records_does_not_excuse_later_ones():
    """Step 12 is in the first window, which has 16 records, but not in the start that spikes are compared with."""
    early = with_fault(healthy(), lambda _, record: {"grad_norm": 300.0} if record["step"] == 12 else {})
    assert [event.rule for event in replay(FACTS, with_fault(early, spike))] == ["gradient_spikes"]


def test_a_rule_fires_again_only_after_its_condition_has_been_absent():
    fault = FAULTS["entropy_collapse"][0]
    sick, well = with_fault(healthy(), fault), healthy(seed=1)
    engine, fired = RuleEngine(replace(FACTS)), []
    for step, record in enumerate([*sick, *well[: REARM_RECORDS + 20], *sick[-20:], *sick[-20:]], start=1):
        fired += [each.step for each in engine.add(step, record | {"step": step, "pairs_seen": step * PAIRS})]
    assert len(fired) == 2
    assert fired[1] > STEPS + REARM_RECORDS


def test_a_condition_that_comes_and_goes_does_not_fire_again():
    """Only records in a row without the condition count: here there are never as many."""
    rule = Rule("flicker", "it flickers", ("none",), lambda history: {"step": 1.0} if next(holds) else None)
    pattern = [True, *[False] * (REARM_RECORDS - 1)]
    holds = iter(pattern * 3 + [False, True])
    engine = RuleEngine(replace(FACTS), [rule])
    fired = [step for step in range(len(pattern) * 3 + 2) if engine.check(step)]
    assert fired == [0, len(pattern) * 3 + 1]


def test_a_record_of_an_evaluation_or_of_skipped_steps_is_ignored():
    engine = RuleEngine(replace(FACTS))
    assert engine.add(3, {"eval/loss": 9.0}) == []
    assert engine.add(3, {"lr": 1e-6, "pairs_seen": 0}) == []


def test_the_message_has_the_step_the_numbers_and_the_setting_to_change():
    fault, known = FAULTS["likelihood_displacement"]
    (event,) = replay(known, with_fault(healthy(), fault))
    text = str(event)
    assert text.startswith(f"health: likelihood_displacement at step {event.step}: the chosen responses become less")
    assert f"chosen NLL per token now {event.evidence['chosen NLL per token now']:.4g}" in text
    assert text.endswith("set rpo_alpha=1, lower actor_train.training_args.learning_rate, or raise beta")


def test_repetition_is_checked_at_evaluations_without_training_metrics():
    engine = RuleEngine(replace(FACTS))
    assert engine.add(10, {"samples/repetition/policy": 0.35, "samples/repetition/reference": 0.1}) == []
    (event,) = engine.add(20, {"samples/repetition/policy": 0.55, "samples/repetition/reference": 0.1})
    assert (event.rule, event.step) == ("repetition", 20)


def evaluations(training: Metrics, of_validation: list[Metrics], pairs: int) -> list[str]:
    """The rules that fire if every evaluation follows ten steps of 8 pairs with these training metrics."""
    engine, fired = RuleEngine(History(total_steps=50, num_training_pairs=400, num_validation_pairs=pairs)), []
    for number, evaluated in enumerate(of_validation):
        for step in range(10 * number + 1, 10 * number + 11):
            fired += engine.add(step, {"loss": 0.1, "pairs_seen": 8 * step, **training})
        fired += engine.add(10 * number + 10, {f"eval/{name}": value for name, value in evaluated.items()})
    return [f"{event.rule} at {event.step}" for event in fired]


def test_swapped_columns_are_found_from_validation_within_400_pairs():
    """The evaluations of a quickstart run whose training file has its columns swapped, on 24 validation pairs."""
    accuracies, losses = (0.292, 0.125, 0.083, 0.083, 0.042), (1.17, 1.35, 1.5, 1.6, 1.63)
    training = {"rewards/accuracies": 1.0, "rewards/margins": 3.0}
    logged = [
        {"rewards/accuracies": accuracy, "rewards/margins": -0.5, "loss": loss}
        for accuracy, loss in zip(accuracies, losses, strict=True)
    ]
    assert evaluations(training, logged, pairs=24) == ["validation_below_chance at 30"]
    # the margins alone: as large as in training, with the opposite sign
    logged = [each | {"rewards/accuracies": 0.3, "rewards/margins": -3.0} for each in logged]
    assert evaluations(training, logged, pairs=24) == ["validation_below_chance at 10"]


def test_swapped_columns_are_not_reported_as_overfitting_too():
    """2,400 validation pairs: the rise of 0.2 is beyond the limit, which is 10 % of the first loss."""
    training = {"rewards/accuracies": 1.0, "rewards/margins": 3.0}
    logged = [{"rewards/accuracies": 0.1, "rewards/margins": -0.5, "loss": loss} for loss in (1.2, 1.4, 1.6)]
    assert evaluations(training, logged, pairs=2400) == ["validation_below_chance at 10"]


@pytest.mark.parametrize(
    ("training", "accuracy", "margin"),
    [
        ({"rewards/accuracies": 0.3, "rewards/margins": -2.0}, 0.2, -2.0),
        ({"rewards/accuracies": 0.66, "rewards/margins": 0.01}, 0.45, -0.005),
        ({"rewards/accuracies": 1.0, "rewards/margins": 3.0}, 0.4, -0.8),
        ({"rewards/accuracies": 0.9, "rewards/margins": -0.1}, 0.5, 0.0),
        ({}, 0.0, -9.0),
    ],
    ids=["training prefers the rejected side too", "noise of the start", "chance", "outliers", "no training metrics"],
)
def test_validation_is_below_chance_only_if_training_is_clearly_above(training, accuracy, margin):
    logged = [{"rewards/accuracies": accuracy, "rewards/margins": margin, "loss": 0.69}] * 5
    assert evaluations(training, logged, pairs=100) == []


@pytest.mark.parametrize(
    ("losses", "trained", "fired"),
    [
        ([0.69, 0.5, 0.55, 0.75, 0.9], 0.2, ["overfitting at 40"]),
        ([0.69, 0.9, 1.2], 0.2, ["overfitting at 20"]),
        ([0.69, 0.65, 0.72, 0.6, 0.7], 0.2, []),
        ([0.69, 0.9, 1.2], 1.0, []),
        ([math.nan, 0.69, math.inf, 0.6], 0.2, []),
    ],
    ids=["above its minimum", "above its first value", "noise of 400 pairs", "training diverges too", "not finite"],
)
def test_overfitting_is_a_validation_loss_far_above_its_minimum(losses, trained, fired):
    """400 validation pairs: the limit is 20 % of the first loss, 0.14."""
    logged = [{"rewards/accuracies": 0.6, "rewards/margins": 0.5, "loss": loss} for loss in losses]
    training = {"rewards/accuracies": 0.9, "rewards/margins": 1.0, "loss": trained}
    assert evaluations(training, logged, pairs=400) == fired


@pytest.mark.parametrize(("pairs_per_record", "first"), [(8, 512), (16, 512), (128, 768), (100, 600)])
def test_rules_compare_from_the_pair_on_that_is_announced(pairs_per_record, first):
    history, seen = replace(FACTS), 0
    while history.recent() is None:
        seen += pairs_per_record
        history.add(seen, {"loss": 1.0, "pairs_seen": seen})
    assert seen == first == pairs_before_comparison(pairs_per_record)


def test_the_advice_leaves_out_what_the_losses_refuse():
    (rule,) = (each for each in RULES if each.name == "length_exploitation")
    assert rule.advice() == (
        "set length_penalty=0.01 (R-DPO), set ld_alpha=0.5 (LD-DPO), set length_normalization=true, or balance the "
        "lengths in the data"
    )
    assert rule.advice({"ld_alpha", "length_normalization"}) == (
        "set length_penalty=0.01 (R-DPO) or balance the lengths in the data"
    )
    assert all(each.advice(REFUSABLE) for each in RULES), "no rule is left without advice"
