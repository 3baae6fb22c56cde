"""Hand-derived values and gradients of every loss.

One pair: chosen logps (-1, -2), rejected (-2, -2, -3); reference chosen (-2, -2), rejected (-1, -2, -2).
So pi_w = -3, pi_l = -7, r_w = 1, r_l = -2, z = 3; means: r_w 1/2, r_l -2/3, margin 7/6; pi_w -3/2, pi_l -7/3.
With beta 1/2: x = beta z = 3/2, s = sig(x) = 0.817574476194, -logsig(x) = 0.201413277983, -logsig(-x) = 1.701413277983.
Every token of a side has the same gradient, so one number a side is enough.
"""

import math

import pytest
import torch

from tests.support.loss_cases import ALL_LOSSES, bare, evaluate, hand_pairs, objective_of
from thresher.losses.formulas import BCOPair

CASES = [
    # 0.9 * 0.2014 + 0.1 * 1.7014; dL/dx = s - 0.9, times beta
    ("sigmoid", {"beta": 0.5, "label_smoothing": 0.1}, 0.351413277983, -0.041212761903, 0.041212761903),
    # plain DPO: -logsig(x); dL/dx = s - 1
    ("sigmoid", {"beta": 0.5}, 0.201413277983, -0.091212761903, 0.091212761903),
    # (0.9 * 0.2014 - 0.1 * 1.7014) / 0.8; dL/dx = (-0.9 (1 - s) - 0.1 s) / 0.8 = s - 1.125
    ("robust", {"beta": 0.5, "label_smoothing": 0.1}, 0.013913277983, -0.153712761903, 0.153712761903),
    # beta 1/4: 1 - 3/4; slope -beta
    ("hinge", {"beta": 0.25}, 0.25, -0.25, 0.25),
    # beyond a reward margin of one the hinge is flat
    ("hinge", {"beta": 0.5}, 0.0, 0.0, 0.0),
    # (7/6 - 1)^2; 2/6 by the mean margin, 1/2 and 1/3 by a token of either side
    ("ipo", {"beta": 0.5}, 1 / 36, 1 / 6, -1 / 9),
    # (3 - 1)^2; slope 4
    ("ipo_sum", {"beta": 0.5}, 4.0, 4.0, -4.0),
    # s (log s - log 0.9) + (1-s) (log(1-s) - log 0.1); dL/dx = s (1-s) (x - log 9): the entropy's own terms cancel
    ("exo_pair", {"beta": 0.5, "label_smoothing": 0.1}, 0.031138796406, -0.051994286003, 0.051994286003),
    # a = beta r_w = 1/2, b = beta r_l = -1: sp(-a) + sp(a)/2 + sp(b)/2;
    # beta (-sig(-a) + sig(a)/2) and beta sig(b)/2
    ("nca_pair", {"beta": 0.5}, 1.117746320029, -0.033155501599, 0.067235355342),
    # no shift: sp(-1/2) + sp(-1); -beta sig(-1/2) and beta sig(-1)
    ("bco_pair", {"beta": 0.5}, 0.787338671698, -0.188770334399, 0.134470710685),
    # beta 1: (1 - 1/2)^2 + (-2 + 1/2)^2; 2 * 1/2 and 2 * -3/2
    ("sppo_hard", {"beta": 1.0}, 2.5, 1.0, -3.0),
    # sig(-1/2) + sig(-1); -beta sig'(1/2) and beta sig'(1)
    ("apo_zero", {"beta": 0.5}, 0.646482090168, -0.117501856101, 0.098305966621),
    # sig(1/2) + sig(-3/2); beta (sig'(1/2) - sig'(3/2)) and beta sig'(3/2)
    ("apo_down", {"beta": 0.5}, 0.804884855008, 0.042928630066, 0.074573226035),
    # tau 1/2, so g = sig(3): (1-g) sp(-x) + g exp(-x);
    # dL/dx = g (1-g) / tau (exp(-x) - sp(-x)) - (1-g) (1-s) - g exp(-x)
    ("discopop", {"beta": 0.5, "discopop_tau": 0.5}, 0.222100218049, -0.109618757418, 0.109618757418),
    # beta 3: x = 7/2; -sig(-7/2) beta / 2 and sig(-7/2) beta / 3
    ("sigmoid_norm", {"beta": 3.0}, 0.029750418273, -0.043968346127, 0.029312230751),
    # 2 (-3/2 + 7/3) - 1 = 2/3: sp(-2/3); -sig(-2/3) 2/2 and sig(-2/3) 2/3
    ("simpo", {"beta": 2.0, "gamma": 1.0}, 0.414370086852, -0.339243631234, 0.226162420823),
    # p_w^-a = e^(3/4) = 2.117000016613, p_l^-a = e^(7/6) = 3.211270543154, so q_w - q_l = 2 (3.2113 - 2.1170);
    # x = 2 (q_w - q_l) - 1 = 3.377082106164: sp(-x); dq/dmean = p^-a, so -sig(-x) 2 * 2.1170 / 2 and
    # sig(-x) 2 * 3.2113 / 3
    (
        "alphapo",
        {"beta": 2.0, "gamma": 1.0, "alphapo_alpha": 0.5},
        0.033576880762,
        -0.069902141966,
        0.070689556806,
    ),
    # the chosen side is more likely than under the reference: plain DPO
    ("dpop", {"beta": 0.5, "dpop_lambda": 1.5}, 0.201413277983, -0.091212761903, 0.091212761903),
    # x = (-3 + 7) / 2 = 2: sp(-2) + 0.7 * 3/2; -sig(-2)/2 - 0.7/2 and sig(-2)/2
    ("cpo", {"beta": 0.5, "cpo_alpha": 0.7}, 1.176928011043, -0.409601461011, 0.059601461011),
    # p_w = e^-1.5, p_l = e^-7/3: log odds -1.247517541075 and -2.231331650626, d = 0.983814109551;
    # 3/2 + 0.4 sp(-d); d(log odds)/d(mean) = 1/(1-p), so (-1 - 0.4 sig(-d)/(1-p_w))/2 and 0.4 sig(-d)/(1-p_l)/3
    ("orpo", {"beta": 0.4}, 1.627056225004, -0.570059519085, 0.040181201790),
    # minus the mean; -1/2 a token, nothing on the rejected side
    ("sft", {}, 1.5, -0.5, 0.0),
    # a single pair is its own quantile: plain DPO
    ("aot", {"beta": 0.5}, 0.201413277983, -0.091212761903, 0.091212761903),
    ("aot_unpaired", {"beta": 0.5}, 0.201413277983, -0.091212761903, 0.091212761903),
]


@pytest.mark.parametrize(("name", "parameters", "value", "chosen_slope", "rejected_slope"), CASES)
def test_loss_equals_its_hand_derivation(name, parameters, value, chosen_slope, rejected_slope):
    result = evaluate(objective_of(name, parameters), hand_pairs())
    assert result.values.tolist() == pytest.approx([value], abs=1e-11)
    assert result.chosen_grad.tolist() == pytest.approx([chosen_slope] * 2, abs=1e-11)
    assert result.rejected_grad.tolist() == pytest.approx([rejected_slope] * 3, abs=1e-11)


def test_every_loss_has_a_hand_derivation():
    assert {case[0] for case in CASES} == set(ALL_LOSSES)


def test_bco_pair_subtracts_its_running_mean():
    # delta 1/4: sp(-(1/2 - 1/4)) + sp(-1 - 1/4); -sig(-1/4)/2 and sig(-5/4)/2
    result = evaluate(bare(BCOPair(beta=0.5, delta=0.25, num_pairs_seen=4)), hand_pairs())
    assert result.values.tolist() == pytest.approx([0.827868501224], abs=1e-11)
    assert result.chosen_grad[0].item() == pytest.approx(-0.218911749557, abs=1e-11)
    assert result.rejected_grad[0].item() == pytest.approx(0.111350069413, abs=1e-11)


def test_dpop_lowers_the_margin_by_the_lost_likelihood_of_the_chosen_side():
    pairs = hand_pairs()
    swapped = type(pairs)(
        *(type(side).of(side.rejected, side.chosen) for side in (pairs.policy, pairs.reference) if side is not None)
    )
    # r_w = -2, r_l = 1: beta (-3 - 1.5 * 2) = -3, so sp(3); by r_w beta (1 + 1.5) = 1.25, by r_l -beta
    result = evaluate(objective_of("dpop", {"beta": 0.5, "dpop_lambda": 1.5}), swapped)
    assert result.values.item() == pytest.approx(3.048587351574, abs=1e-11)
    assert result.chosen_grad.tolist() == pytest.approx([-1.190717658528] * 3, abs=1e-11)
    assert result.rejected_grad.tolist() == pytest.approx([0.476287063411] * 2, abs=1e-11)
    assert objective_of("dpop").zero_margin_loss == pytest.approx(math.log(2))


def test_alphapo_is_simpo_at_its_limit():
    pairs = hand_pairs(second=True)
    simpo = evaluate(objective_of("simpo", {"beta": 2.0, "gamma": 1.0}), pairs)
    for alpha, tolerance in ((0.0, 1e-12), (1e-7, 1e-6), (-1e-7, 1e-6), (2e-6, 2e-5), (-2e-6, 2e-5)):
        parameters = {"beta": 2.0, "gamma": 1.0, "alphapo_alpha": alpha}
        for one, other in zip(
            evaluate(objective_of("alphapo", parameters), pairs).as_list(), simpo.as_list(), strict=True
        ):
            torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def test_sigmoid_uses_label_smoothing():
    plain = evaluate(objective_of("sigmoid"), hand_pairs())
    smoothed = evaluate(objective_of("sigmoid", {"label_smoothing": 0.3}), hand_pairs())
    # z = 3, beta 0.1: 0.7 sp(-0.3) + 0.3 sp(0.3) = sp(-0.3) + 0.3 * 0.3
    assert (smoothed.values - plain.values).item() == pytest.approx(0.09, abs=1e-12)


def test_aot_sorts_over_the_whole_step():
    # policy margins 4 and 1, reference 1 and 3/2: sorted, they differ by 0 and 5/2 (pair by pair: 3, -1/2)
    result = evaluate(objective_of("aot", {"beta": 0.5}), hand_pairs(second=True))
    assert result.values.tolist() == pytest.approx([math.log(2), 0.251929081345], abs=1e-11)
    # the first pair holds the upper quantile: -sig(-5/4)/2; the second the lower: -1/4
    assert result.chosen_grad.tolist() == pytest.approx([-0.111350069413] * 2 + [-0.25], abs=1e-11)
    assert result.rejected_grad.tolist() == pytest.approx([0.111350069413] * 3 + [0.25], abs=1e-11)


def test_aot_unpaired_sorts_each_side_on_its_own():
    # r_w: 1, 1/2 -> 1/2, 1; r_l: -2, 1 -> -2, 1: differences 5/2 and 0, and the sides come from different pairs
    result = evaluate(objective_of("aot_unpaired", {"beta": 0.5}), hand_pairs(second=True))
    assert result.values.tolist() == pytest.approx([0.251929081345, math.log(2)], abs=1e-11)
    assert result.chosen_grad.tolist() == pytest.approx([-0.25] * 2 + [-0.111350069413], abs=1e-11)
    assert result.rejected_grad.tolist() == pytest.approx([0.111350069413] * 3 + [0.25], abs=1e-11)


@pytest.mark.parametrize("name", ALL_LOSSES)
def test_zero_margin_loss_is_the_loss_of_policy_equal_to_reference(name):
    pairs = hand_pairs(second=True)
    equal = type(pairs)(pairs.policy, pairs.policy.detach())
    loss = objective_of(name, {} if name == "sft" else {"beta": 0.7})
    values = loss(equal).per_pair.tolist()
    if loss.zero_margin_loss is None:
        assert values[0] != pytest.approx(values[1])  # no constant: the two pairs differ
    else:
        assert values == pytest.approx([loss.zero_margin_loss] * 2, abs=1e-12)


def test_bco_zero_margin_loss_follows_its_delta():
    pairs = hand_pairs()
    equal = type(pairs)(pairs.policy, pairs.policy.detach())
    objective = bare(BCOPair(delta=1.3, num_pairs_seen=1))
    assert objective(equal).per_pair.item() == pytest.approx(objective.zero_margin_loss, abs=1e-12)
    assert objective.zero_margin_loss > 2 * math.log(2) + 0.1


@pytest.mark.parametrize("name", ["orpo", "cpo", "simpo", "alphapo", "sft"])
def test_reference_free_loss_ignores_the_reference(name):
    pairs = hand_pairs()
    with_reference = evaluate(objective_of(name), pairs)
    without = evaluate(objective_of(name), type(pairs)(pairs.policy))
    for one, other in zip(with_reference.as_list(), without.as_list(), strict=True):
        assert torch.equal(one, other)


def test_orpo_is_finite_when_probability_reaches_one():
    for dtype in (torch.float32, torch.float64):
        for chosen, rejected in ((0.0, -1.0), (-1.0, 0.0), (0.0, 0.0), (-1e-12, -1e-9), (-1e4, -1e4), (0.0, -1e4)):
            pairs = hand_pairs()
            policy = type(pairs.policy).of(
                type(pairs.policy.chosen)(torch.full((2,), chosen, dtype=dtype), torch.tensor([2])),
                type(pairs.policy.chosen)(torch.full((2,), rejected, dtype=dtype), torch.tensor([2])),
            )
            result = evaluate(objective_of("orpo", {"beta": 1.0}), type(pairs)(policy))
            assert all(bool(torch.isfinite(t).all()) for t in result.as_list()), (dtype, chosen, rejected)
            assert result.chosen_grad[0] < 0  # the likelihood term still pulls


def test_discopop_is_finite_on_a_lost_pair():
    pairs = hand_pairs()
    policy = type(pairs.policy).of(
        type(pairs.policy.chosen)(torch.full((2,), -1e4), torch.tensor([2])),
        type(pairs.policy.chosen)(torch.full((2,), -1.0), torch.tensor([2])),
    )
    reference = type(pairs.policy).of(policy.rejected, policy.rejected)
    result = evaluate(objective_of("discopop"), type(pairs)(policy, reference))
    # x = 0.1 * -19998: the gate is shut, so only the logistic part -logsig(x) = 1999.8 is left
    assert result.values.item() == pytest.approx(1999.8, rel=1e-5)
    assert result.chosen_grad.tolist() == pytest.approx([-0.1, -0.1], rel=1e-5)
