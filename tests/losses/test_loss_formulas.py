"""Losses and modifiers that TRL lacks, against plain Python formulas and their finite differences.

The oracle uses floats and `math` only: no tensor, no autograd, none of our code.
"""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tests.support.loss_cases import bare, evaluate, objective_of, random_pairs
from thresher.losses import Objective
from thresher.losses.formulas import BCOPair

Row = list[float]
Formula = Callable[[Row, Row, Row, Row], float]


def softplus(x: float) -> float:
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


def margin(win: Row, lose: Row, ref_w: Row, ref_l: Row) -> float:
    return sum(win) - sum(ref_w) - sum(lose) + sum(ref_l)


def mean(row: Row) -> float:
    return sum(row) / len(row)


def log_odds(row: Row) -> float:
    p = math.exp(mean(row))
    return math.log(p / (1 - p))


def cdpo(win: Row, lose: Row, ref_w: Row, ref_l: Row) -> float:
    x = 0.3 * margin(win, lose, ref_w, ref_l)
    return 0.8 * softplus(-x) + 0.2 * softplus(x)


def ipo_sum(win: Row, lose: Row, ref_w: Row, ref_l: Row) -> float:
    return (margin(win, lose, ref_w, ref_l) - 1 / 0.6) ** 2


def bco(win: Row, lose: Row, ref_w: Row, ref_l: Row) -> float:
    chosen = 0.3 * (sum(win) - sum(ref_w)) - 0.4
    rejected = 0.3 * (sum(lose) - sum(ref_l)) - 0.4
    return softplus(-chosen) + softplus(rejected)


def orpo(win: Row, lose: Row, _: Row, __: Row) -> float:
    return -mean(win) + 0.3 * softplus(log_odds(lose) - log_odds(win))


def dpop(win: Row, lose: Row, ref_w: Row, ref_l: Row) -> float:
    """The formula of the paper's second version, and of PaddleNLP's DPOCriterion."""
    logits = margin(win, lose, ref_w, ref_l) - 5 * max(sum(ref_w) - sum(win), 0.0)
    return softplus(-0.3 * logits)


def alphapo(win: Row, lose: Row, _: Row, __: Row) -> float:
    """The steps of TRL's CPOTrainer."""
    q_w, q_l = ((1 - math.exp(mean(row)) ** -0.25) / 0.25 for row in (win, lose))
    return softplus(-2.5 * ((q_w - q_l) - 0.1 / 2.5))


def humanline(win: Row, lose: Row, ref_w: Row, ref_l: Row) -> float:
    """DPO on the sequence rewards of HALOs: each token's log ratio between the bounds, then summed."""
    sums = [
        sum(min(max(p - r, -0.4), 0.3) for p, r in zip(policy, reference, strict=True))
        for policy, reference in ((win, ref_w), (lose, ref_l))
    ]
    return softplus(-0.3 * (sums[0] - sums[1]))


def r_dpo(win: Row, lose: Row, ref_w: Row, ref_l: Row) -> float:
    return softplus(-0.3 * margin(win, lose, ref_w, ref_l) - 0.07 * (len(win) - len(lose)))


def r_dpo_rpo_ld(win: Row, lose: Row, ref_w: Row, ref_l: Row) -> float:
    shared = min(len(win), len(lose))

    def discounted(row: Row) -> float:
        return sum(row[:shared]) + 0.4 * sum(row[shared:])

    z = discounted(win) - discounted(ref_w) - discounted(lose) + discounted(ref_l)
    return softplus(-0.3 * z - 0.07 * (len(win) - len(lose))) - 0.5 * mean(win)


SIGMOID = objective_of("sigmoid", {"beta": 0.3})
CASES: list[tuple[Objective, Formula]] = [
    (objective_of("sigmoid", {"beta": 0.3, "label_smoothing": 0.2}), cdpo),
    (objective_of("ipo_sum", {"beta": 0.3}), ipo_sum),
    (bare(BCOPair(beta=0.3, delta=0.4, num_pairs_seen=8)), bco),
    (objective_of("orpo", {"beta": 0.3}), orpo),
    (objective_of("dpop", {"beta": 0.3, "dpop_lambda": 5.0}), dpop),
    (objective_of("alphapo"), alphapo),
    (replace(SIGMOID, clamp_log_ratio=(-0.4, 0.3)), humanline),
    (replace(SIGMOID, length_penalty=0.07), r_dpo),
    (replace(SIGMOID, length_penalty=0.07, rpo_alpha=0.5, ld_alpha=0.4), r_dpo_rpo_ld),
]


def slopes(formula: Formula, rows: tuple[Row, Row, Row, Row], which: int, step: float = 1e-5) -> Row:
    """Differentiate by each token of one side, by central differences."""
    result = []
    for token in range(len(rows[which])):
        ends = []
        for sign in (1, -1):
            moved = [list(row) for row in rows]
            moved[which][token] += sign * step
            ends.append(formula(*moved))
        result.append((ends[0] - ends[1]) / (2 * step))
    return result


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-6), (torch.float32, 1e-5)], ids=["fp64", "fp32"])
@pytest.mark.parametrize(("objective", "formula"), CASES, ids=[formula.__name__ for _, formula in CASES])
def test_loss_equals_its_formula(objective, formula, dtype, tolerance):
    pairs = random_pairs(dtype=dtype)
    assert pairs.reference is not None
    columns = [
        [row.tolist() for row in response.values.detach().double().split(response.lengths.tolist())]
        for response in (
            pairs.policy.chosen,
            pairs.policy.rejected,
            pairs.reference.chosen,
            pairs.reference.rejected,
        )
    ]
    rows = list(zip(*columns, strict=True))
    result = evaluate(objective, pairs)
    assert result.values.tolist() == pytest.approx([formula(*r) for r in rows], rel=tolerance, abs=tolerance)
    chosen = [slope for r in rows for slope in slopes(formula, r, 0)]
    rejected = [slope for r in rows for slope in slopes(formula, r, 1)]
    assert result.chosen_grad.tolist() == pytest.approx(chosen, rel=tolerance, abs=tolerance)
    assert result.rejected_grad.tolist() == pytest.approx(rejected, rel=tolerance, abs=tolerance)
