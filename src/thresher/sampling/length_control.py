"""Win rate at equal lengths: what a judge would prefer if policy and reference wrote answers of the same length.

AlpacaEval 2's estimator (2404.04475, equation 2) without its terms for the difficulty of an instruction, which are
fitted to the verdicts on many models. It fits

    P(policy wins) = sigmoid(theta + phi tanh((len(policy) - len(reference)) / std))

to the outcomes by their cross-entropy, with lengths in characters, and returns sigmoid(theta).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from thresher.sampling.answers import SampledPrompt

_MAX_ITERATIONS = 100


def fit_equal_lengths(samples: Sequence[SampledPrompt], outcomes: Sequence[float]) -> tuple[float, float] | None:
    """Return theta and its standard error; None if all outcomes are wins, or all are losses."""
    wins = np.array(outcomes, dtype=np.float64)
    if not 0.0 < wins.mean() < 1.0:
        return None
    longer = np.array([len(each.policy.text) - len(each.reference.text) for each in samples], dtype=np.float64)
    spread = longer.std(ddof=1) if len(longer) > 1 else 0.0
    effect = np.tanh(longer / spread) if spread > 0.0 else np.zeros_like(longer)
    # the last row is the prior of phi, log-F(1, 1): without it, phi is infinite where the longer answer always wins,
    # and undetermined where all differences are equal
    inputs = np.stack([np.append(np.ones_like(effect), 0.0), np.append(effect, 1.0)], axis=1)
    targets = np.append(wins, 0.5)
    weights = np.zeros(2)
    loss = _cross_entropy(inputs @ weights, targets)
    for _ in range(_MAX_ITERATIONS):
        fitted = 1.0 / (1.0 + np.exp(-(inputs @ weights)))
        curvature = inputs.T @ (inputs * (fitted * (1.0 - fitted))[:, None])
        step = np.linalg.solve(curvature, inputs.T @ (targets - fitted))
        # Newton's step may overshoot far from the minimum
        while (new := _cross_entropy(inputs @ (weights + step), targets)) > loss and np.abs(step).max() > 1e-12:
            step /= 2.0
        weights, loss = weights + step, min(new, loss)
        if np.abs(step).max() < 1e-9:
            break
    return float(weights[0]), math.sqrt(np.linalg.inv(curvature)[0, 0])


def _cross_entropy(logits: np.ndarray, targets: np.ndarray) -> float:
    return float(np.sum(np.logaddexp(0.0, logits) - targets * logits))
