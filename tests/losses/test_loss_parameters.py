"""Every parameter of every loss and modifier changes the result, and an invalid value is rejected with a suggestion."""

from dataclasses import replace

import pytest
import torch

from tests.support.loss_cases import ALL_LOSSES, evaluate, objective_of, random_pairs
from thresher.errors import UserError
from thresher.losses import Objective, make_loss, parameter_defaults

TURNED = {
    "beta": 0.37,
    "label_smoothing": 0.21,
    "gamma": 0.4,
    "cpo_alpha": 0.3,
    "alphapo_alpha": -0.5,
    "discopop_tau": 0.6,
    "dpop_lambda": 3.0,
}
ALL_PARAMETERS = [(name, parameter) for name in ALL_LOSSES for parameter in parameter_defaults(name)]


@pytest.mark.parametrize(("name", "parameter"), ALL_PARAMETERS)
def test_every_parameter_changes_value_and_gradient(name, parameter):
    pairs = random_pairs()
    default = evaluate(objective_of(name), pairs)
    turned = evaluate(objective_of(name, {parameter: TURNED[parameter]}), pairs)
    assert (default.values - turned.values).abs().max() > 1e-3
    assert (default.chosen_grad - turned.chosen_grad).abs().max() > 1e-4


MODIFIERS = {
    "clamp_log_ratio": (-0.3, 0.2),
    "f_divergence": "js_divergence",
    "ld_alpha": 0.3,
    "length_penalty": 0.2,
    "rpo_alpha": 0.5,
    "wpo": True,
    "margin": 0.5,
    "reference_free": True,
}


@pytest.mark.parametrize("modifier", MODIFIERS)
def test_every_modifier_changes_value_and_gradient(modifier):
    pairs = random_pairs(collision=True)
    default = evaluate(objective_of("sigmoid"), pairs)
    turned = evaluate(replace(objective_of("sigmoid"), **{modifier: MODIFIERS[modifier]}), pairs)
    assert (default.values - turned.values).abs().max() > 1e-3
    assert (default.chosen_grad - turned.chosen_grad).abs().max() > 1e-4


def test_alpha_divergence_coef_changes_the_result():
    pairs = random_pairs()
    objective = replace(objective_of("sigmoid"), f_divergence="alpha_divergence")
    one, other = evaluate(objective, pairs), evaluate(replace(objective, f_alpha_divergence_coef=0.9), pairs)
    assert (one.values - other.values).abs().max() > 1e-3


def test_no_modifier_of_the_objective_is_left_out_here():
    # of single responses and lists (test_responses.py)
    changes_no_loss = {"measures_entropy", "comparisons", "reads_labels", "reference_point", "groups"}
    fields = set(Objective.__dataclass_fields__) - {"terms", "f_alpha_divergence_coef"} - changes_no_loss
    assert fields == set(MODIFIERS)


@pytest.mark.parametrize("column", ["weight", "margin"])
def test_pair_columns_change_value_and_gradient(column):
    pairs = random_pairs()
    default = evaluate(objective_of("sigmoid"), pairs)
    turned = evaluate(objective_of("sigmoid"), replace(pairs, **{column: torch.linspace(0.2, 2.0, 6)}))
    assert (default.values - turned.values).abs().max() > 1e-2
    assert (default.chosen_grad - turned.chosen_grad).abs().max() > 1e-3


@pytest.mark.parametrize("name", [name for name in ALL_LOSSES if name != "sft"])
@pytest.mark.parametrize("beta", [0.0, -1.0, float("nan"), float("inf"), True, "0.1"])
def test_beta_must_be_a_positive_number(name, beta):
    with pytest.raises(UserError, match=rf"{name}: beta must be above 0, got .*; try"):
        make_loss(name, {"beta": beta})


@pytest.mark.parametrize(
    ("name", "parameter", "value"),
    [
        ("sigmoid", "label_smoothing", 0.6),
        ("sigmoid", "label_smoothing", -0.1),
        ("robust", "label_smoothing", 0.5),
        ("exo_pair", "label_smoothing", 0.0),
        ("aot", "label_smoothing", 0.6),
        ("aot_unpaired", "label_smoothing", -0.1),
        ("simpo", "gamma", -1.0),
        ("cpo", "cpo_alpha", -1.0),
        ("alphapo", "gamma", -1.0),
        ("alphapo", "alphapo_alpha", float("inf")),
        ("dpop", "dpop_lambda", -1.0),
        ("discopop", "discopop_tau", 0.0),
        ("discopop", "discopop_tau", 1.5),
    ],
)
def test_parameter_out_of_range_is_rejected_with_a_suggestion(name, parameter, value):
    with pytest.raises(UserError, match=rf"{name}: {parameter} must be .*, got {value}; try"):
        make_loss(name, {parameter: value})


@pytest.mark.parametrize(
    ("modifier", "value", "suggestion"),
    [
        ("clamp_log_ratio", (0.1, 1.5), "lower bound of clamp_log_ratio must be below 0, got 0.1; try -1"),
        ("clamp_log_ratio", (-1.0, 0.0), "upper bound of clamp_log_ratio must be above 0, got 0.0; try 1.5"),
        ("ld_alpha", 1.5, "try 0.5"),
        ("ld_alpha", -0.1, "try 0.5"),
        ("length_penalty", -0.1, "try 0.01"),
        ("rpo_alpha", -1.0, "try 1"),
        ("f_divergence", "kl", "use one of"),
        ("f_alpha_divergence_coef", float("nan"), "try 0.5"),
    ],
)
def test_modifier_out_of_range_is_rejected_with_a_suggestion(modifier, value, suggestion):
    with pytest.raises(UserError, match=suggestion):
        replace(objective_of("sigmoid"), **{modifier: value})
