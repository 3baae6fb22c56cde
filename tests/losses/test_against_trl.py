"""Losses against TRL's code: values and per-token gradients, in fp64 and fp32."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.support.loss_cases import COUPLED_LOSSES, Evaluated, evaluate, objective_of, random_pairs
from tests.support.trl_oracle import Settings, trl_cpo_losses, trl_mean_loss, trl_odds_ratio, trl_per_pair
from thresher.losses import Objective, ObjectiveInputs, make_loss

pytestmark = pytest.mark.slow  # importing TRL takes several seconds

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-5}
DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])

KNOBS = {
    "sigmoid": {"beta": 0.3},
    "robust": {"beta": 0.3, "label_smoothing": 0.2},
    "hinge": {"beta": 0.3},
    "ipo": {"beta": 0.3},
    "exo_pair": {"beta": 0.3, "label_smoothing": 0.05},
    "nca_pair": {"beta": 0.3},
    "bco_pair": {"beta": 0.3},
    "sppo_hard": {"beta": 0.3},
    "apo_zero": {"beta": 0.3},
    "apo_down": {"beta": 0.3},
    "discopop": {"beta": 0.3, "discopop_tau": 0.2},
    "sigmoid_norm": {"beta": 0.3},
    "sft": {},
    "aot": {"beta": 0.3, "label_smoothing": 0.2},
    "aot_unpaired": {"beta": 0.3, "label_smoothing": 0.2},
}
INDEPENDENT = [name for name in KNOBS if name not in COUPLED_LOSSES]


def assert_same(ours: Evaluated, theirs: Evaluated, dtype: torch.dtype) -> None:
    for one, other in zip(ours.as_list(), theirs.as_list(), strict=True):
        torch.testing.assert_close(one, other.to(dtype), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@DTYPES
@pytest.mark.parametrize("name", INDEPENDENT)
def test_loss_equals_trl(name, dtype):
    pairs = random_pairs(dtype=dtype)
    theirs = trl_per_pair([name], pairs, Settings(**KNOBS[name]))
    assert_same(evaluate(objective_of(name, KNOBS[name]), pairs), theirs, dtype)


@DTYPES
@pytest.mark.parametrize("name", COUPLED_LOSSES)
def test_coupled_loss_equals_trl_on_the_whole_step(name, dtype):
    pairs = random_pairs(dtype=dtype)
    ours = evaluate(objective_of(name, KNOBS[name]), pairs)
    theirs = trl_mean_loss([name], pairs, Settings(**KNOBS[name]))
    mean = Evaluated(ours.values.mean(), ours.chosen_grad / 6, ours.rejected_grad / 6)
    assert_same(mean, theirs, dtype)


@DTYPES
@pytest.mark.parametrize("name", [n for n in INDEPENDENT if n != "sft"])
def test_ld_alpha_equals_trl(name, dtype):
    pairs = random_pairs(dtype=dtype)
    objective = replace(objective_of(name, KNOBS[name]), ld_alpha=0.4)
    assert_same(evaluate(objective, pairs), trl_per_pair([name], pairs, Settings(**KNOBS[name], ld_alpha=0.4)), dtype)


# TRL multiplies in place, which breaks the backward pass of its hinge.
@DTYPES
@pytest.mark.parametrize("name", [n for n in INDEPENDENT if n not in ("sft", "hinge")])
def test_wpo_equals_trl(name, dtype):
    pairs = random_pairs(dtype=dtype, collision=True)
    objective = replace(objective_of(name, KNOBS[name]), wpo=True)
    theirs = trl_per_pair([name], pairs, Settings(**KNOBS[name], use_weighting=True))
    assert_same(evaluate(objective, pairs), theirs, dtype)


@pytest.mark.parametrize(
    ("divergence", "dtype"),
    [
        ("forward_kl", torch.float64),
        ("forward_kl", torch.float32),
        ("js_divergence", torch.float64),
        ("js_divergence", torch.float32),
        ("alpha_divergence", torch.float32),  # TRL's knows no fp64; test_modifiers holds it to the formula
    ],
)
@pytest.mark.parametrize("name", ["sigmoid", "robust", "hinge", "ipo", "exo_pair", "discopop", "sigmoid_norm"])
def test_f_divergence_equals_trl(name, divergence, dtype):
    pairs = random_pairs(dtype=dtype)
    objective = replace(objective_of(name, KNOBS[name]), f_divergence=divergence, f_alpha_divergence_coef=0.7)
    settings = Settings(**KNOBS[name], f_divergence_type=divergence, f_alpha_divergence_coef=0.7)
    assert_same(evaluate(objective, pairs), trl_per_pair([name], pairs, settings), dtype)


@DTYPES
def test_mixture_equals_trl(dtype):
    names, weights = ["sigmoid", "bco_pair", "sft"], (0.8, 0.2, 1.0)
    pairs = random_pairs(dtype=dtype)
    losses = [make_loss("sigmoid", {"beta": 0.3}), make_loss("bco_pair", {"beta": 0.3}), make_loss("sft", {})]
    objective = Objective(tuple(zip(losses, weights, strict=True)))
    assert_same(evaluate(objective, pairs), trl_per_pair(names, pairs, Settings(beta=0.3, loss_weights=weights)), dtype)


@DTYPES
def test_rpo_equals_trl_with_an_sft_term(dtype):
    pairs = random_pairs(dtype=dtype)
    theirs = trl_per_pair(["sigmoid", "sft"], pairs, Settings(beta=0.3, loss_weights=(1.0, 0.6)))
    assert_same(evaluate(replace(objective_of("sigmoid", {"beta": 0.3}), rpo_alpha=0.6), pairs), theirs, dtype)


def per_side(pairs: ObjectiveInputs, chosen: Tensor, rejected: Tensor, mean: bool) -> tuple[Tensor, Tensor]:
    """Sum or average logps side by side, by plain loops."""

    def reduce(values: Tensor, lengths: Tensor) -> Tensor:
        rows = values.split(lengths.tolist())
        return torch.stack([row.mean() if mean else row.sum() for row in rows])

    return reduce(chosen, pairs.policy.chosen.lengths), reduce(rejected, pairs.policy.rejected.lengths)


def trl_reference_free(name: str, pairs: ObjectiveInputs) -> Evaluated:
    chosen = pairs.policy.chosen.values.detach().clone().requires_grad_()
    rejected = pairs.policy.rejected.values.detach().clone().requires_grad_()
    means = per_side(pairs, chosen, rejected, mean=True)
    sums = per_side(pairs, chosen, rejected, mean=False)
    if name == "simpo":
        losses = trl_cpo_losses(*means, "simpo", 2.5, gamma=1.2)
    elif name == "alphapo":
        losses = trl_cpo_losses(*means, "simpo", 2.5, gamma=0.1, alpha=0.25)
    elif name == "cpo":
        losses = trl_cpo_losses(*sums, "sigmoid", 0.3) - 0.7 * means[0]
    else:
        losses = -means[0] - trl_odds_ratio(*means, 0.3)
    grads = torch.autograd.grad(losses.sum(), [chosen, rejected])
    return Evaluated(losses.detach(), *grads)


@DTYPES
@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("simpo", {"beta": 2.5, "gamma": 1.2}),
        ("alphapo", {"beta": 2.5, "gamma": 0.1, "alphapo_alpha": 0.25}),
        ("cpo", {"beta": 0.3, "cpo_alpha": 0.7}),
        ("orpo", {"beta": 0.3}),
    ],
)
def test_reference_free_loss_equals_trl(name, parameters, dtype):
    pairs = random_pairs(dtype=dtype)
    # TRL's ORPO casts to fp32, so its fp64 run is only good to fp32.
    tolerance_of = torch.float32 if name == "orpo" else dtype
    theirs = trl_reference_free(name, pairs)
    ours = evaluate(objective_of(name, parameters), pairs)
    for one, other in zip(ours.as_list(), theirs.as_list(), strict=True):
        tolerance = TOLERANCE[tolerance_of]
        torch.testing.assert_close(one, other.to(dtype), rtol=tolerance, atol=tolerance)
