"""The objective: metrics, state, rejected combinations, and what it needs from its caller."""

import dataclasses
import math
from dataclasses import replace

import pytest
import torch

from tests.support.loss_cases import (
    ALL_LOSSES,
    COUPLED_LOSSES,
    F_DIVERGENCE_LOSSES,
    INDEPENDENT_LOSSES,
    REFERENCE_LOSSES,
    evaluate,
    hand_pairs,
    objective_of,
    random_pairs,
    side,
    take_pairs,
)
from thresher.errors import UserError
from thresher.losses import (
    ExampleLogps,
    MetricSum,
    Objective,
    ObjectiveInputs,
    ResponseLogps,
    concat_pairs,
    make_loss,
    merge_metrics,
)
from thresher.losses.formulas import BCOPair


def mixed(*names: str) -> Objective:
    return Objective(tuple((make_loss(name, {}), 1.0) for name in names))


def test_metrics_equal_their_hand_derivation():
    metrics = objective_of("sigmoid", {"beta": 0.5})(hand_pairs(second=True)).metrics
    means = {name: metric.mean for name, metric in metrics.items()}
    # pairs: r_w 1 and 1/2, r_l -2 and 1; logits 3/2 and -1/4
    expected = {
        "loss": (math.log1p(math.exp(-1.5)) + math.log1p(math.exp(0.25))) / 2,
        "rewards/chosen": 0.5 * 0.75,
        "rewards/rejected": 0.5 * -0.5,
        "rewards/accuracies": 0.5,
        "rewards/margins": 0.5 * 1.25,
        "logps/chosen": -2.0,
        "logps/rejected": -4.5,
        "lengths/chosen": 1.5,
        "lengths/rejected": 2.0,
        "lengths/longer_chosen": 0.0,  # of one pair: the sides of the second have the same length
        "lengths/longer_preferred": 0.0,
        "kl": ((1 - 2) / 2 + (0.5 + 1) / 2) / 2,
        "sft_loss": 4 / 3,  # 1 + 2 + 1 nats over 3 tokens, not a mean of means
    }
    assert means == pytest.approx(expected, abs=1e-12)


def test_sft_loss_counts_tokens_and_the_rest_counts_pairs():
    metrics = objective_of("sigmoid")(hand_pairs(second=True)).metrics
    assert metrics.pop("sft_loss").count == 3
    for name in ("lengths/longer_chosen", "lengths/longer_preferred"):  # pairs whose sides differ in length
        assert metrics.pop(name).count == 1
    assert {metric.count for metric in metrics.values()} == {2}


def test_the_longer_response_is_compared_in_pairs_of_different_lengths():
    # chosen has 2, 1 and 1 tokens, rejected 1, 2 and 1; the policy prefers chosen, chosen and rejected
    policy = ExampleLogps.of(side([[-1.0, -1.0], [-1.0], [-2.0]]), side([[-1.0], [-2.0, -2.0], [-1.0]]))
    reference = ExampleLogps.of(side([[-2.0, -2.0], [-2.0], [-1.0]]), side([[-1.0], [-1.0, -1.0], [-1.0]]))
    metrics = objective_of("sigmoid")(ObjectiveInputs(policy, reference)).metrics
    assert metrics["lengths/longer_chosen"].mean == 0.5
    assert metrics["lengths/longer_preferred"].mean == 0.5  # the first pair's longer one, the second pair's shorter one
    swapped = ObjectiveInputs(
        ExampleLogps.of(policy.rejected, policy.chosen), ExampleLogps.of(reference.rejected, reference.chosen)
    )
    assert objective_of("sigmoid")(swapped).metrics["lengths/longer_preferred"].mean == 0.5


def test_entropy_is_a_mean_over_the_tokens_of_both_sides():
    chosen, rejected = (
        ResponseLogps(torch.zeros(len(values)), torch.tensor([len(values)]), entropy=torch.tensor(values))
        for values in ([1.0, 2.0], [6.0])
    )
    sides = ExampleLogps.of(chosen, rejected)
    assert objective_of("simpo")(ObjectiveInputs(sides)).metrics["entropy"].mean == 3.0
    assert "entropy" not in objective_of("sigmoid")(hand_pairs(second=True)).metrics


def test_ties_count_half():
    sides = ExampleLogps.of(side([[-1.0], [-1.0], [-3.0], [-2.0]]), side([[-1.0], [-2.0], [-2.0], [-2.0]]))
    reference = ExampleLogps.of(side([[-1.0]] * 4), side([[-1.0]] * 4))
    metrics = objective_of("sigmoid")(ObjectiveInputs(sides, reference)).metrics
    # tie, win, loss, tie
    assert float(metrics["rewards/accuracies"].sum) == 0.5 + 1 + 0 + 0.5


@pytest.mark.parametrize("name", REFERENCE_LOSSES)
@pytest.mark.parametrize("num_tokens", [1, 100, 10_000])
def test_a_policy_that_equals_its_reference_within_rounding_ties_every_pair(name, num_tokens):
    """In fp32, another order of sums changes a logp by a few units in the last place."""
    draw = torch.Generator().manual_seed(0)

    def logps() -> tuple[ResponseLogps, ResponseLogps]:
        policy = -torch.empty(20 * num_tokens).exponential_(0.2, generator=draw)
        ulps = torch.randint(-4, 5, policy.shape, generator=draw)
        lengths = torch.full((20,), num_tokens)
        return ResponseLogps(policy, lengths), ResponseLogps(policy * (1 + ulps * 2.0**-24), lengths)

    (chosen, reference_chosen), (rejected, reference_rejected) = logps(), logps()
    inputs = ObjectiveInputs(ExampleLogps.of(chosen, rejected), ExampleLogps.of(reference_chosen, reference_rejected))
    assert objective_of(name)(inputs).metrics["rewards/accuracies"].mean == 0.5


def test_a_margin_above_rounding_is_not_a_tie():
    logps = ResponseLogps(torch.full((1000,), -2.0), torch.tensor([1000]))
    better = ResponseLogps(logps.values + 1e-6, logps.lengths)
    inputs = ObjectiveInputs(ExampleLogps.of(better, logps), ExampleLogps.of(logps, logps))
    assert objective_of("sigmoid")(inputs).metrics["rewards/accuracies"].mean == 1.0


MODIFIERS = {
    "clamp_log_ratio": ((-1.0, 1.5), "log ratios clamped to (-1.0, 1.5)"),
    "f_divergence": ("alpha_divergence", "f_divergence alpha_divergence (0.5)"),
    "ld_alpha": (0.5, "ld_alpha 0.5 (LD-DPO)"),
    "length_penalty": (0.01, "length_penalty 0.01 (R-DPO)"),
    "margin": (0.3, "gamma 0.3"),
    "wpo": (True, "pairs weighted by WPO"),
    "reference_free": (True, "reference-free"),
    "comparisons": ("adjacent", "comparisons adjacent"),
}


def test_the_formula_has_every_term_and_modifier_that_is_on():
    plain = Objective(((make_loss("sigmoid", {"beta": 0.5}), 1.0),))
    assert plain.describe() == "sigmoid(beta=0.5)"
    assert replace(plain, rpo_alpha=1.0).describe() == "sigmoid(beta=0.5) + 1.0 * RPO NLL"
    assert mixed("sigmoid", "sft").describe() == "1.0 * sigmoid(beta=0.1) + 1.0 * sft"
    no_modifiers = {
        "terms",
        "measures_entropy",
        "rpo_alpha",
        "f_alpha_divergence_coef",
        "reads_labels",
        "reference_point",
        "groups",
    }
    assert MODIFIERS.keys() == {field.name for field in dataclasses.fields(Objective)} - no_modifiers
    for name, (value, text) in MODIFIERS.items():
        assert replace(plain, **{name: value}).describe() == f"sigmoid(beta=0.5), {text}"


@pytest.mark.parametrize("name", ALL_LOSSES)
def test_metrics_do_not_depend_on_micro_batches(name):
    pairs = random_pairs(dtype=torch.float32)
    objective = objective_of(name)
    whole = objective(pairs).metrics
    parts = merge_metrics([objective(take_pairs(pairs, part)).metrics for part in ([0, 1], [2], [3, 4, 5])])
    assert set(whole) == set(parts)
    for key, metric in whole.items():
        if key == "loss" and name in COUPLED_LOSSES:
            continue
        assert metric.mean == pytest.approx(parts[key].mean, rel=1e-12), key
        assert metric.count == parts[key].count


def test_metrics_are_detached_and_fp64():
    for metric in objective_of("sigmoid")(random_pairs(dtype=torch.float32)).metrics.values():
        assert not metric.sum.requires_grad
        assert metric.sum.dtype is torch.float64


def test_ld_alpha_does_not_change_what_logps_and_kl_mean():
    plain = objective_of("sigmoid")(hand_pairs()).metrics
    discounted = replace(objective_of("sigmoid"), ld_alpha=0.1)(hand_pairs()).metrics
    for name in ("logps/chosen", "logps/rejected", "kl", "sft_loss"):
        assert discounted[name].mean == plain[name].mean
    assert discounted["rewards/rejected"].mean != plain["rewards/rejected"].mean


@pytest.mark.parametrize(
    ("name", "parameters", "chosen", "rejected"),
    [
        ("sigmoid", {"beta": 0.5}, 0.5, -1.0),
        ("nca_pair", {"beta": 0.5}, 0.5, -1.0),
        ("ipo_sum", {"beta": 0.5}, 0.5, -1.0),
        ("ipo", {"beta": 0.6}, 0.3, -0.4),  # length-averaged losses compare rewards per token
        ("sigmoid_norm", {"beta": 3.0}, 1.5, -2.0),
        ("simpo", {"beta": 2.0}, -3.0, -14 / 3),
        ("alphapo", {"beta": 2.0, "alphapo_alpha": 0.5}, 4 * (1 - math.exp(0.75)), 4 * (1 - math.exp(7 / 6))),
        ("dpop", {"beta": 0.5}, 0.5, -1.0),
        ("orpo", {"beta": 0.6}, -0.9, -1.4),
        ("cpo", {"beta": 0.5}, -1.5, -3.5),
        ("sft", {}, -1.5, -7 / 3),
    ],
)
def test_rewards_are_what_the_loss_compares(name, parameters, chosen, rejected):
    metrics = objective_of(name, parameters)(hand_pairs()).metrics
    assert metrics["rewards/chosen"].mean == pytest.approx(chosen, abs=1e-12)
    assert metrics["rewards/rejected"].mean == pytest.approx(rejected, abs=1e-12)


def test_rewards_come_from_the_first_term_that_compares_sides():
    losses = make_loss("sft", {}), make_loss("sigmoid", {"beta": 0.5}), make_loss("hinge", {"beta": 0.7})
    objective = Objective(tuple((loss, 1.0) for loss in losses))
    assert objective(hand_pairs()).metrics["rewards/chosen"].mean == pytest.approx(0.5)


def test_kl_is_absent_without_a_reference():
    pairs = ObjectiveInputs(random_pairs().policy)
    assert "kl" not in objective_of("simpo")(pairs).metrics
    assert "kl" in objective_of("simpo")(random_pairs()).metrics


@pytest.mark.parametrize("name", REFERENCE_LOSSES)
def test_missing_reference_is_rejected_with_a_fix(name):
    assert objective_of(name).needs_reference
    with pytest.raises(UserError, match=r"no reference logps; set reference\.mode"):
        objective_of(name)(ObjectiveInputs(random_pairs().policy))


def test_objective_needs_what_one_of_its_terms_needs():
    assert not mixed("simpo", "sft").needs_reference
    assert mixed("sft", "sigmoid").needs_reference
    assert mixed("sft", "aot").couples_pairs
    assert not mixed("sft", "sigmoid").couples_pairs
    assert replace(mixed("sigmoid"), wpo=True).statistics.squared_probs
    assert not any(mixed("sigmoid").statistics)


def test_zero_margin_loss_adds_up_and_gives_way_to_modifiers():
    objective = Objective(((make_loss("sigmoid", {}), 0.8), (make_loss("nca_pair", {}), 0.5)))
    assert objective.zero_margin_loss == pytest.approx(1.8 * math.log(2))
    assert replace(objective, rpo_alpha=1.0).zero_margin_loss is None
    assert mixed("sigmoid", "sft").zero_margin_loss is None
    assert replace(mixed("sigmoid"), length_penalty=0.1).zero_margin_loss is None


@pytest.mark.parametrize("name", ALL_LOSSES)
def test_f_divergence_is_rejected_if_a_loss_uses_raw_ratios(name):
    if name in F_DIVERGENCE_LOSSES:
        assert replace(objective_of(name), f_divergence="forward_kl").f_divergence == "forward_kl"
        return
    with pytest.raises(UserError, match=f"has no effect on {name}; .*supports it: discopop, exo_pair"):
        replace(objective_of(name), f_divergence="forward_kl")


@pytest.mark.parametrize(
    ("names", "modifier"),
    [
        (("aot",), {"wpo": True}),
        (("aot_unpaired",), {"wpo": True}),
        (("sigmoid", "bco_pair"), {"f_divergence": "js_divergence"}),
        (("nca_pair",), {"length_penalty": 0.1}),
        (("orpo",), {"length_penalty": 0.1}),
        (("simpo",), {"ld_alpha": 0.5}),
        (("simpo",), {"clamp_log_ratio": (-1.0, 1.5)}),
        (("aot",), {"clamp_log_ratio": (-1.0, 1.5)}),
        (("dpop",), {"reference_free": True}),
        (("orpo",), {"ld_alpha": 0.5}),
        (("sft",), {"f_divergence": "js_divergence"}),
        (("sft",), {"wpo": True}),
    ],
)
def test_modifier_that_a_loss_would_ignore_is_rejected(names, modifier):
    with pytest.raises(UserError, match=r"has no effect on .*turn it off, or use a loss that supports it"):
        replace(mixed(*names), **modifier)


def test_sft_beside_a_preference_loss_does_not_forbid_its_modifiers():
    objective = replace(mixed("sigmoid", "sft"), f_divergence="forward_kl", ld_alpha=0.5)
    parts = [replace(mixed("sigmoid"), f_divergence="forward_kl", ld_alpha=0.5), mixed("sft")]
    pairs = random_pairs()
    expected = sum(evaluate(part, pairs).values for part in parts)
    torch.testing.assert_close(evaluate(objective, pairs).values, expected)


@pytest.mark.parametrize(("name", "column"), [("nca_pair", "margin"), ("orpo", "margin"), ("aot", "weight")])
def test_pair_column_that_a_loss_would_ignore_is_rejected(name, column):
    pairs = replace(random_pairs(), **{column: torch.ones(6)})
    with pytest.raises(UserError, match=f"a {column} column in the data has no effect on {name}"):
        objective_of(name)(pairs)


@pytest.mark.parametrize("modifier", ["clamp_log_ratio", "f_divergence", "ld_alpha", "length_penalty", "margin", "wpo"])
@pytest.mark.parametrize("name", ALL_LOSSES)
def test_a_loss_supports_a_modifier_exactly_when_it_changes_it(name, modifier):
    """The `supports` lists are facts: a listed modifier changes the loss, any other is rejected."""
    pairs = random_pairs(collision=True)
    plain = objective_of(name)
    before = evaluate(plain, pairs).values
    changes = {
        "clamp_log_ratio": (-0.3, 0.2),
        "f_divergence": "js_divergence",
        "ld_alpha": 0.3,
        "length_penalty": 0.2,
        "wpo": True,
    }
    objective = plain
    supported = modifier in plain.terms[0][0].supports
    if modifier == "margin":
        pairs = replace(pairs, margin=torch.ones(6))
    elif supported:
        objective = replace(plain, **{modifier: changes[modifier]})
    if supported:
        assert (evaluate(objective, pairs).values - before).abs().max() > 1e-3
    else:
        with pytest.raises(UserError, match="has no effect on"):
            objective(pairs) if modifier == "margin" else replace(plain, **{modifier: changes[modifier]})


def test_sum_of_losses_is_checked():
    with pytest.raises(UserError, match="at least one loss"):
        Objective(())
    with pytest.raises(UserError, match="only once in a sum"):
        mixed("sigmoid", "sigmoid")
    with pytest.raises(UserError, match="weight in the sum"):
        Objective(((make_loss("sigmoid", {}), 0.0),))


def test_bco_delta_is_the_mean_reward_of_all_earlier_steps():
    objective = mixed("sigmoid", "bco_pair")
    seen: list[float] = []
    for step in range(3):
        pairs = random_pairs(2 + step, seed=step)
        metrics = objective(pairs).metrics
        for word in ("chosen", "rejected"):
            policy, reference = getattr(pairs.policy, word), getattr(pairs.reference, word)
            seen += (0.1 * (policy.sums() - reference.sums())).tolist()
        objective = objective.after_step(metrics)
        assert objective.state()["bco_pair"]["delta"] == pytest.approx(sum(seen) / len(seen), abs=1e-12)
    assert objective.state()["bco_pair"]["num_pairs_seen"] == 2 + 3 + 4
    assert abs(objective.state()["bco_pair"]["delta"]) > 1e-3


def test_bco_delta_does_not_depend_on_micro_batches():
    pairs, objective = random_pairs(), objective_of("bco_pair")
    whole = objective.after_step(objective(pairs).metrics).state()
    parts = [objective(take_pairs(pairs, part)).metrics for part in ([0, 1, 2, 3], [4, 5])]
    split = objective.after_step(merge_metrics(parts)).state()
    assert split["bco_pair"] == pytest.approx(whole["bco_pair"], rel=1e-12)


def test_state_round_trip_restores_the_loss_exactly():
    objective = mixed("sigmoid", "bco_pair")
    trained = objective.after_step(objective(random_pairs()).metrics)
    restored = objective.with_state(trained.state())
    assert restored == trained
    assert restored != objective
    assert torch.equal(evaluate(restored, hand_pairs()).values, evaluate(trained, hand_pairs()).values)


def test_state_of_another_objective_is_rejected():
    with pytest.raises(UserError, match="resume with the losses"):
        mixed("sigmoid").with_state({"bco_pair": {"delta": 0.0, "num_pairs_seen": 1.0}})
    with pytest.raises(UserError, match="resume with the losses"):
        mixed("bco_pair").with_state({})
    with pytest.raises(UserError, match="delta and num_pairs_seen"):
        BCOPair().with_state({"delta": 1.0})


def test_restored_state_has_the_types_of_its_defaults():
    restored = BCOPair(delta=1).with_state({"delta": 0.25, "num_pairs_seen": 3.0})
    assert (restored.delta, restored.num_pairs_seen) == (0.25, 3)
    assert isinstance(restored.num_pairs_seen, int)


def test_an_empty_step_does_not_move_the_running_mean():
    assert BCOPair(delta=0.4, num_pairs_seen=3).after_step(0.0, 0.0, 0) == BCOPair(delta=0.4, num_pairs_seen=3)


def test_stateless_objective_has_no_state():
    objective = mixed("sigmoid")
    assert objective.state() == {}
    assert objective.with_state({}) == objective
    assert objective.after_step(objective(hand_pairs()).metrics) == objective


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_logps_are_rejected(dtype):
    pairs = hand_pairs()
    chosen = dataclasses.replace(pairs.policy.chosen, values=pairs.policy.chosen.values.detach().to(dtype))
    with pytest.raises(TypeError, match="losses need fp32 or fp64"):
        objective_of("sft")(ObjectiveInputs(ExampleLogps.of(chosen, pairs.policy.rejected)))


def test_reference_of_other_tokens_is_rejected():
    pairs = hand_pairs()
    other = ExampleLogps.of(ResponseLogps(torch.zeros(3), torch.tensor([3])), pairs.reference.rejected)
    with pytest.raises(ValueError, match="both must score the same tokens"):
        objective_of("sigmoid")(ObjectiveInputs(pairs.policy, other))


def test_no_gradient_reaches_the_reference():
    pairs = hand_pairs()
    leaf = pairs.reference.chosen.values.clone().requires_grad_()
    reference = ExampleLogps.of(dataclasses.replace(pairs.reference.chosen, values=leaf), pairs.reference.rejected)
    objective_of("sigmoid")(ObjectiveInputs(pairs.policy, reference)).per_pair.sum().backward()
    assert leaf.grad is None
    assert pairs.policy.chosen.values.grad is not None


def test_metric_sums_merge_by_adding_sums_and_counts():
    merged = MetricSum(3.0, 2).merge(MetricSum(torch.tensor(1.0), 6))
    assert (float(merged.sum), merged.count, merged.mean) == (4.0, 8, 0.5)
    assert MetricSum(0.0, 0).mean == 0.0


@pytest.mark.parametrize("name", INDEPENDENT_LOSSES)
def test_concatenated_micro_batches_keep_weight_and_margin(name):
    pairs = replace(random_pairs(), weight=torch.rand(6))
    parts = [take_pairs(pairs, [0, 1]), take_pairs(pairs, [2, 3, 4, 5])]
    together = evaluate(objective_of(name), concat_pairs(parts))
    assert torch.equal(together.values, evaluate(objective_of(name), pairs).values)


def test_a_micro_batch_without_a_column_joins_with_its_neutral_value():
    pairs = random_pairs(2)
    joined = concat_pairs([pairs, replace(pairs, weight=torch.tensor([2.0, 3.0]), margin=torch.tensor([0.5, 0.0]))])
    assert joined.weight.tolist() == [1.0, 1.0, 2.0, 3.0]
    assert joined.margin.tolist() == [0.0, 0.0, 0.5, 0.0]


def test_a_reference_of_some_micro_batches_only_is_rejected():
    pairs = random_pairs(2)
    with pytest.raises(ValueError, match="1 of 2 micro-batches"):
        concat_pairs([pairs, ObjectiveInputs(pairs.policy)])
