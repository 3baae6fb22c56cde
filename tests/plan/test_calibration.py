"""The fit of step times: it finds the terms that made them, and predicts steps of other sizes."""

from __future__ import annotations

import pytest

from thresher.plan.calibrate import StepTime, StepWork, TimedStep

SIZES = [(1, 4e9), (1, 5e9), (1, 13e9), (1, 11e9), (3, 12e9), (3, 14e9)]


def timed(true: StepTime, noise: float = 0.0) -> list[TimedStep]:
    works = [StepWork(*size) for size in SIZES]
    return [TimedStep(work, 1, true.predict(work) * (1 + noise * (-1) ** index)) for index, work in enumerate(works)]


@pytest.mark.parametrize("true", [(0.2, 0.05, 1e-10), (0.0, 0.3, 1e-11), (0.5, 0.0, 2e-10), (0.0, 0.0, 1e-10)])
def test_a_fit_finds_the_cost_of_a_step_a_micro_batch_and_a_flop(true):
    fit = StepTime.fit(timed(StepTime(*true)))
    assert (fit.per_step, fit.per_micro_batch) == pytest.approx(true[:2], abs=1e-6)
    assert fit.per_flop == pytest.approx(true[2])


def test_noise_makes_no_term_negative_and_the_prediction_stays_near():
    true = StepTime(0.0, 0.05, 1e-10)
    fit = StepTime.fit(timed(true, noise=0.1))
    assert min(fit.per_step, fit.per_micro_batch, fit.per_flop) >= 0
    large = StepWork(20, 100e9)
    assert fit.predict(large) == pytest.approx(true.predict(large), rel=0.25)
