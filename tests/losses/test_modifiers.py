"""Each modifier against a hand derivation or its formula, and in combination with the losses it acts on."""

import math
from dataclasses import replace

import pytest
import torch

from tests.support.loss_cases import F_DIVERGENCE_LOSSES, evaluate, hand_pairs, objective_of, random_pairs, side
from thresher.errors import UserError
from thresher.losses import ExampleLogps, Objective, ObjectiveInputs, make_loss, score_pairs
from thresher.losses.scores import DIVERGENCES, FDivergence, wpo_weights


def softplus(x: float) -> float:
    return math.log1p(math.exp(x))


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


@pytest.mark.parametrize(
    ("name", "score", "slope"),
    [
        ("reverse_kl", lambda r: r, lambda _: 1.0),
        ("forward_kl", lambda r: 1 - math.exp(-r), lambda r: math.exp(-r)),
        # log(2t / (1 + t)) with t = e^r has slope 1 / (1 + t)
        ("js_divergence", lambda r: math.log(2 * math.exp(r) / (1 + math.exp(r))), lambda r: 1 / (1 + math.exp(r))),
        # (t^(c-1) - 1) / (c - 1) with c = 0.7 has slope t^(c-1)
        ("alpha_divergence", lambda r: (math.exp(-0.3 * r) - 1) / -0.3, lambda r: math.exp(-0.3 * r)),
    ],
)
@pytest.mark.parametrize("ratio", [-2.0, -0.1, 0.0, 1.5])
def test_f_divergence_equals_its_formula(name, score, slope, ratio):
    leaf = torch.tensor([ratio], dtype=torch.float64, requires_grad=True)
    value = FDivergence(name, 0.7)(leaf)
    value.sum().backward()
    assert value.item() == pytest.approx(score(ratio), abs=1e-12)
    assert leaf.grad.item() == pytest.approx(slope(ratio), abs=1e-12)


def test_alpha_divergence_joins_forward_and_reverse_kl():
    ratio = torch.linspace(-2, 2, 9, dtype=torch.float64)
    torch.testing.assert_close(FDivergence("alpha_divergence", 0.0)(ratio), FDivergence("forward_kl")(ratio))
    assert torch.equal(FDivergence("alpha_divergence", 1.0)(ratio), ratio)
    torch.testing.assert_close(FDivergence("alpha_divergence", 1.0 + 1e-5)(ratio), ratio, atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("loss", F_DIVERGENCE_LOSSES)
@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("coef", [-1.0, 2.0])
def test_f_divergence_is_finite_at_extreme_ratios(loss, divergence, coef, dtype):
    policy = ExampleLogps.of(side([[-1e4], [0.0], [0.0]], dtype), side([[0.0], [-1e4], [0.0]], dtype))
    reference = ExampleLogps.of(side([[0.0], [-1e4], [0.0]], dtype), side([[-1e4], [0.0], [0.0]], dtype))
    objective = replace(objective_of(loss), f_divergence=divergence, f_alpha_divergence_coef=coef)
    result = evaluate(objective, ObjectiveInputs(policy, reference))
    assert all(bool(torch.isfinite(t).all()) for t in result.as_list())


def test_rewards_follow_the_f_divergence():
    objective = replace(objective_of("sigmoid", {"beta": 0.5}), f_divergence="forward_kl")
    metrics = objective(hand_pairs()).metrics
    # r_w = 1, r_l = -2: beta (1 - e^-1) and beta (1 - e^2)
    assert metrics["rewards/chosen"].mean == pytest.approx(0.5 * (1 - math.exp(-1)), abs=1e-12)
    assert metrics["rewards/rejected"].mean == pytest.approx(0.5 * (1 - math.exp(2)), abs=1e-12)


def test_ld_alpha_discounts_tokens_beyond_the_shorter_side():
    # chosen has 2 tokens, rejected 3: only the third rejected token is discounted, on policy (-3) and reference (-2)
    scores = score_pairs(hand_pairs(), ld_alpha=0.25)
    assert scores.logps.chosen.item() == -3.0
    assert scores.logps.rejected.item() == -4.0 + 0.25 * -3.0
    assert scores.reference.logps.rejected.item() == -3.0 + 0.25 * -2.0
    # r_w = 1, r_l = -1 - 0.25: z = 2.25
    assert scores.scores.margin.item() == 2.25


def test_ld_alpha_1_is_plain_dpo():
    assert score_pairs(hand_pairs(), ld_alpha=1.0).logps.rejected.item() == -4.0 - 3.0
    assert (
        score_pairs(hand_pairs(), ld_alpha=1.0).scores.margin.item() == score_pairs(hand_pairs()).scores.margin.item()
    )


def test_ld_alpha_scales_the_gradient_of_the_surplus_only():
    result = evaluate(replace(objective_of("sigmoid", {"beta": 0.5}), ld_alpha=0.25), hand_pairs())
    slope = 0.5 * sigmoid(-1.125)
    assert result.chosen_grad.tolist() == pytest.approx([-slope, -slope], abs=1e-12)
    assert result.rejected_grad.tolist() == pytest.approx([slope, slope, 0.25 * slope], abs=1e-12)


def test_ld_alpha_leaves_likelihood_terms_alone():
    long_chosen = ExampleLogps.of(side([[-1.0, -3.0]]), side([[-1.0]]))
    scores = score_pairs(ObjectiveInputs(long_chosen), ld_alpha=0.0)
    assert scores.logps.chosen.item() == -1.0
    assert scores.mean_chosen_nll.item() == 2.0


def test_a_clamped_token_counts_its_bound_and_has_no_gradient():
    # log ratios of the tokens: chosen 1 and 0, rejected -1, 0 and -1; clamped to 0.75, 0 and -0.5, 0, -0.5: z = 1.75
    result = evaluate(replace(objective_of("sigmoid", {"beta": 0.5}), clamp_log_ratio=(-0.5, 0.75)), hand_pairs())
    assert result.values.item() == pytest.approx(softplus(-0.875), abs=1e-12)
    slope = 0.5 * sigmoid(-0.875)
    assert result.chosen_grad.tolist() == pytest.approx([0.0, -slope], abs=1e-12)
    assert result.rejected_grad.tolist() == pytest.approx([0.0, slope, 0.0], abs=1e-12)


def test_a_clamp_beyond_every_ratio_changes_nothing():
    pairs = random_pairs()
    for name in ("sigmoid", "ipo", "bco_pair", "aot_unpaired", "dpop"):
        wide = evaluate(replace(objective_of(name), clamp_log_ratio=(-50.0, 50.0)), pairs)
        for one, other in zip(wide.as_list(), evaluate(objective_of(name), pairs).as_list(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


def test_a_clamp_leaves_logps_and_likelihood_terms_alone():
    plain = replace(objective_of("sigmoid", {"beta": 0.5}), rpo_alpha=1.0)
    clamped = replace(plain, clamp_log_ratio=(-0.5, 0.75))
    before, after = (objective(hand_pairs()).metrics for objective in (plain, clamped))
    for name in ("logps/chosen", "logps/rejected", "kl", "sft_loss"):
        assert after[name].mean == before[name].mean
    assert (after["rewards/chosen"].mean, after["rewards/rejected"].mean) == (0.375, -0.5)
    assert after["loss"].mean == pytest.approx(softplus(-0.875) + 1.5, abs=1e-12)
    assert clamped.zero_margin_loss == plain.zero_margin_loss


def test_a_clamp_and_ld_alpha_weigh_the_clamped_tokens():
    objective = replace(objective_of("sigmoid", {"beta": 0.5}), clamp_log_ratio=(-0.5, 0.75), ld_alpha=0.25)
    # the third rejected token counts a quarter: r_l = -0.5 - 0.125
    assert evaluate(objective, hand_pairs()).values.item() == pytest.approx(softplus(-0.5 * 1.375), abs=1e-12)


def test_a_clamp_needs_a_reference():
    with pytest.raises(UserError, match=r"clamp_log_ratio needs a reference; remove it, or set reference\.mode"):
        replace(objective_of("sigmoid"), clamp_log_ratio=(-1.0, 1.5), reference_free=True)


def test_length_penalty_is_not_scaled_by_beta_and_raises_the_gradient_of_short_winners():
    # |y_w| - |y_l| = -1, z = 3: the logit is 0.5 * 3 + 0.2 * -1 = 1.3
    objective = replace(objective_of("sigmoid", {"beta": 0.5}), length_penalty=0.2)
    result = evaluate(objective, hand_pairs())
    assert result.values.item() == pytest.approx(softplus(-1.3), abs=1e-12)
    assert result.chosen_grad[0].item() == pytest.approx(-0.5 * sigmoid(-1.3), abs=1e-12)
    # the chosen side is the shorter one, so this pair pulls harder than without the penalty (R-DPO's gradient)
    assert result.chosen_grad[0] < evaluate(objective_of("sigmoid", {"beta": 0.5}), hand_pairs()).chosen_grad[0]


def test_data_margin_is_not_scaled_by_beta():
    pairs = replace(hand_pairs(), margin=torch.tensor([0.7]))
    # 0.5 * 3 - 0.7 = 0.8
    result = evaluate(objective_of("sigmoid", {"beta": 0.5}), pairs)
    assert result.values.item() == pytest.approx(softplus(-0.8), abs=1e-7)  # the margin itself is fp32
    both = evaluate(replace(objective_of("sigmoid", {"beta": 0.5}), length_penalty=0.2), pairs)
    assert both.values.item() == pytest.approx(softplus(-0.6), abs=1e-7)


@pytest.mark.parametrize(
    ("name", "parameters", "expected"),
    [
        ("robust", {"beta": 0.5, "label_smoothing": 0.1}, (0.9 * softplus(-1.0) - 0.1 * softplus(1.0)) / 0.8),
        ("hinge", {"beta": 0.4}, 1 - (1.2 - 0.5)),
        ("ipo_sum", {"beta": 0.5}, (3 - 1 - 0.5 / 0.5) ** 2),
        ("ipo", {"beta": 0.5}, (7 / 6 - 1 - 0.5 / 0.5) ** 2),
        ("sigmoid_norm", {"beta": 3.0}, softplus(-3.0)),
        ("simpo", {"beta": 2.0, "gamma": 1.0}, softplus(-(5 / 3 - 1 - 0.5))),
        ("cpo", {"beta": 0.5, "cpo_alpha": 0.0}, softplus(-1.5)),
    ],
)
def test_data_margin_reaches_each_logit(name, parameters, expected):
    pairs = replace(hand_pairs(), margin=torch.tensor([0.5]))
    assert evaluate(objective_of(name, parameters), pairs).values.item() == pytest.approx(expected, abs=1e-12)


def test_rpo_alpha_adds_the_mean_chosen_nll():
    plain = evaluate(objective_of("sigmoid"), hand_pairs())
    result = evaluate(replace(objective_of("sigmoid"), rpo_alpha=0.4), hand_pairs())
    # NLL_w = 3 over 2 tokens: 0.4 * 1.5, and -0.4 / 2 a token
    assert (result.values - plain.values).item() == pytest.approx(0.6, abs=1e-12)
    assert (result.chosen_grad - plain.chosen_grad).tolist() == pytest.approx([-0.2, -0.2], abs=1e-12)
    assert torch.equal(result.rejected_grad, plain.rejected_grad)


def with_collision(pairs: ObjectiveInputs) -> ObjectiveInputs:
    """Give the hand pair log_sum_squared_probs of -0.5 (chosen) and -1 (rejected)."""
    policy = ExampleLogps.of(
        replace(pairs.policy.chosen, log_sum_squared_probs=torch.full((2,), -0.5, dtype=torch.float64)),
        replace(pairs.policy.rejected, log_sum_squared_probs=torch.full((3,), -1.0, dtype=torch.float64)),
    )
    return replace(pairs, policy=policy)


@pytest.mark.parametrize("name", ["sigmoid", "hinge", "simpo"])
def test_wpo_weights_value_and_gradient_equally(name):
    pairs = with_collision(hand_pairs())
    # mean(logp - log collision): -1.5 + 0.5 = -1 and -7/3 + 1 = -4/3
    weight = math.exp(-1 - 4 / 3)
    assert wpo_weights(pairs.policy).tolist() == pytest.approx([weight], abs=1e-12)
    plain = evaluate(objective_of(name), pairs)
    result = evaluate(replace(objective_of(name), wpo=True), pairs)
    for one, other in zip(result.as_list(), plain.as_list(), strict=True):
        torch.testing.assert_close(one, weight * other)  # no gradient through the weight


def test_wpo_weighs_the_rpo_term_too():
    pairs = with_collision(hand_pairs())
    weight = math.exp(-1 - 4 / 3)
    rpo = replace(objective_of("sigmoid"), rpo_alpha=0.4)
    plain, result = evaluate(rpo, pairs), evaluate(replace(rpo, wpo=True), pairs)
    for one, other in zip(result.as_list(), plain.as_list(), strict=True):
        torch.testing.assert_close(one, weight * other)


def test_wpo_without_collisions_names_the_fix():
    with pytest.raises(UserError, match="log_sum_squared_probs"):
        replace(objective_of("sigmoid"), wpo=True)(hand_pairs())


def test_pair_weight_multiplies_value_and_gradient():
    pairs = random_pairs(3)
    weight = torch.tensor([0.0, 1.0, 2.5])
    plain = evaluate(objective_of("sigmoid"), pairs)
    result = evaluate(objective_of("sigmoid"), replace(pairs, weight=weight))
    torch.testing.assert_close(result.values, plain.values * weight.double())
    tokens = torch.repeat_interleave(weight.double(), pairs.policy.chosen.lengths)
    torch.testing.assert_close(result.chosen_grad, plain.chosen_grad * tokens)


def test_mixture_is_the_weighted_sum_of_its_terms():
    pairs = random_pairs()
    names, weights = ("sigmoid", "bco_pair", "sft"), (0.8, 0.2, 1.5)
    losses = [make_loss(name, {}) for name in names]
    mixed = evaluate(Objective(tuple(zip(losses, weights, strict=True))), pairs)
    parts = [evaluate(objective_of(name), pairs).as_list() for name in names]
    for index, value in enumerate(mixed.as_list()):
        torch.testing.assert_close(value, sum(w * part[index] for w, part in zip(weights, parts, strict=True)))


def test_a_constant_margin_is_subtracted_from_the_logit():
    """r_w = 1, r_l = -2, beta = 0.1: -logsig(0.1 * 3 - 0.5) = softplus(0.2), with a reference as without."""
    objective = replace(objective_of("sigmoid", {"beta": 0.1}), margin=0.5)
    assert evaluate(objective, hand_pairs()).values.item() == pytest.approx(softplus(0.2), abs=1e-12)
    assert objective.zero_margin_loss is None


def test_a_constant_margin_equals_the_same_margin_in_the_data():
    pairs = random_pairs()
    column = replace(pairs, margin=torch.full((6,), 0.7, dtype=torch.float64))
    for name in ("sigmoid", "sigmoid_norm", "hinge", "ipo", "robust"):
        constant = replace(objective_of(name), margin=0.7)(pairs).per_pair
        torch.testing.assert_close(constant, objective_of(name)(column).per_pair, atol=1e-12, rtol=0)


def test_reference_free_dpo_uses_the_policys_logps_as_log_ratios():
    """The pair has summed logps -3 and -7: -logsig(0.1 * 4) = softplus(-0.4)."""
    objective = replace(objective_of("sigmoid", {"beta": 0.1}), reference_free=True)
    assert not objective.needs_reference
    pairs = replace(hand_pairs(), reference=None)
    assert evaluate(objective, pairs).values.item() == pytest.approx(softplus(-0.4), abs=1e-12)
    cpo = objective_of("cpo", {"beta": 0.1, "cpo_alpha": 0.0})
    torch.testing.assert_close(objective(pairs).per_pair, cpo(pairs).per_pair, atol=1e-12, rtol=0)
