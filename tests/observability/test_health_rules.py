"""Each health rule fires on a run that has its fault and on no other, at any logging interval."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
import pytest

from thresher.observability.health import rules
from thresher.observability.health.history import History
from thresher.observability.health.monitor import REARM_RECORDS, RuleEngine, replay
from thresher.observability.health.rules import RULES, Rule, RunFacts

STEPS, PAIRS = 200, 16
FACTS = RunFacts(
    total_steps=STEPS,
    num_pairs=1000,
    duplicates=10,
    initial_loss=math.log(2),
    starts_at_reference=True,
    logp_noise=1e-3,
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


# the rule, the change of a healthy run that it must find, and the facts of the run
FAULTS: dict[str, tuple[Fault, RunFacts]] = {
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
    "repeated_data": (lambda *_: {}, RunFacts(STEPS, num_pairs=1000, duplicates=80)),
}


def test_every_rule_has_a_fault():
    assert FAULTS.keys() == {rule.name for rule in RULES}


@pytest.mark.parametrize("name", FAULTS)
def test_a_rule_fires_once_on_its_fault_and_no_other_rule_does(name):
    fault, facts = FAULTS[name]
    events = list(replay(facts, with_fault(healthy(), fault)))
    assert [event.rule for event in events] == [name]
    assert all(math.isfinite(value) for value in events[0].evidence.values())


@pytest.mark.parametrize("seed", range(20))
def test_noise_fires_no_rule(seed):
    assert list(replay(FACTS, healthy(seed, steps=400))) == []


@pytest.mark.parametrize("every", [5, 20])
@pytest.mark.parametrize("name", sorted(FAULTS.keys() - {"initial_loss", "mismatched_reference", "gradient_spikes"}))
def test_the_verdict_does_not_depend_on_logging_steps(name, every):
    fault, facts = FAULTS[name]
    assert [event.rule for event in replay(facts, in_intervals(with_fault(healthy(), fault), every))] == [name]
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

    facts = RunFacts(total_steps=72, num_pairs=985)
    (event,) = replay(facts, records([-28.2, -33.8, -42.3, -45.6], [0.0, 1.48, 2.43, 2.52]))
    assert event.rule == "likelihood_displacement"
    assert event.step <= 50  # before the last third of the run
    assert "rpo_alpha" in event.advice
    # the pilot at learning rate 2e-5: chosen fell by 4.2 nats
    assert list(replay(facts, records([-28.2, -29.6, -31.0, -32.4], [0.0, 0.5, 1.0, 1.47]))) == []


def test_a_run_without_a_reference_has_no_rule_that_needs_one():
    missing = {"kl", "entropy"}
    records = [{name: value for name, value in record.items() if name not in missing} for record in healthy()]
    assert list(replay(RunFacts(STEPS, num_pairs=1000), records)) == []
    displaced = with_fault(records, FAULTS["likelihood_displacement"][0])
    assert [each.rule for each in replay(RunFacts(STEPS, 1000), displaced)] == ["likelihood_displacement"]


def test_supervised_fine_tuning_is_not_measured_by_preferences():
    records = with_fault(healthy(), FAULTS["chance_accuracy"][0])
    assert list(replay(RunFacts(STEPS, num_pairs=1000, compares_sides=False), records)) == []


@pytest.mark.parametrize(
    ("chosen", "preferred", "fires"),
    [(0.9, 0.9, False), (0.55, 0.75, True), (0.3, 0.5, False), (0.45, 0.25, True), (0.7, 0.5, False)],
    ids=["as in the data", "longer", "chance, short data", "shorter", "chance, long data"],
)
def test_a_preference_for_a_length_is_one_beyond_the_data_and_beyond_chance(chosen, preferred, fires):
    history = History(10_000, 100)
    for record in healthy():
        history.add(
            int(record["step"]), record | {"lengths/longer_chosen": chosen, "lengths/longer_preferred": preferred}
        )
    assert (rules.length_exploitation(history, FACTS) is not None) == fires


def test_an_accuracy_window_that_begins_during_the_warm_up_is_not_judged():
    """The policy learns from step 91 on; any 64 steps before that, 1,024 pairs, begin in the first 40 of 200."""
    late = with_fault(healthy(), lambda _, record: {"rewards/accuracies": 0.5 if record["step"] <= 90 else 0.95})
    assert list(replay(FACTS, late)) == []


def test_the_newest_window_shares_no_record_with_the_first():
    """Records of 64 pairs: the first window is steps 1 to 4, so the first one to compare with it is steps 5 to 8."""
    history, windows = History(10_000, 100), []
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
    engine, fired = RuleEngine(FACTS), []
    for step, record in enumerate([*sick, *well[: REARM_RECORDS + 20], *sick[-20:], *sick[-20:]], start=1):
        fired += [each.step for each in engine.add(step, record | {"step": step, "pairs_seen": step * PAIRS})]
    assert len(fired) == 2
    assert fired[1] > STEPS + REARM_RECORDS


def test_a_condition_that_comes_and_goes_does_not_fire_again():
    """Only records in a row without the condition count: here there are never as many."""
    rule = Rule("flicker", "it flickers", "none", lambda history, facts: {"step": 1.0} if next(holds) else None)
    pattern = [True, *[False] * (REARM_RECORDS - 1)]
    holds = iter(pattern * 3 + [False, True])
    engine = RuleEngine(FACTS, [rule])
    fired = [step for step in range(len(pattern) * 3 + 2) if engine.check(step)]
    assert fired == [0, len(pattern) * 3 + 1]


def test_a_record_of_an_evaluation_or_of_skipped_steps_is_ignored():
    engine = RuleEngine(FACTS)
    assert engine.add(3, {"eval/loss": 9.0}) == []
    assert engine.add(3, {"lr": 1e-6, "pairs_seen": 0}) == []


def test_the_message_has_the_step_the_numbers_and_the_setting_to_change():
    fault, facts = FAULTS["likelihood_displacement"]
    (event,) = replay(facts, with_fault(healthy(), fault))
    text = str(event)
    assert text.startswith(f"health: likelihood_displacement at step {event.step}: the chosen responses become less")
    assert f"chosen NLL per token now {event.evidence['chosen NLL per token now']:.4g}" in text
    assert text.endswith("set rpo_alpha=1, lower actor_train.training_args.learning_rate, or raise beta")


def test_repetition_is_checked_at_evaluations_without_training_metrics():
    engine = RuleEngine(FACTS)
    assert engine.add(10, {"samples/repetition/policy": 0.35, "samples/repetition/reference": 0.1}) == []
    (event,) = engine.add(20, {"samples/repetition/policy": 0.55, "samples/repetition/reference": 0.1})
    assert (event.rule, event.step) == ("repetition", 20)
