"""Statistics of answers that need no judge."""

from __future__ import annotations

import pytest

from thresher.sampling.answers import Answer, SampledAnswers, SampledPrompt, distinct_share


def answer(*tokens: int, ended: bool = False) -> Answer:
    return Answer("text", tokens, ended)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ((1, 2, 3), 0.0),  # shorter than a phrase
        ((1, 2, 3, 4, 5), 0.0),
        ((7,) * 13, 0.9),  # 10 phrases, one of them new
        ((1, 2, 3, 4) * 3, 5 / 9),  # 9 phrases in 4 rotations
    ],
)
def test_repetition_is_the_share_of_phrases_that_occurred_before(tokens: tuple[int, ...], expected: float) -> None:
    assert answer(*tokens).repetition == pytest.approx(expected)


def test_the_token_that_ends_an_answer_is_part_of_its_length_only() -> None:
    assert answer(7, 7, 7, 7, 7, 2, ended=True).repetition == 0.5
    assert answer(7, 7, 7, 7, 7, 2).repetition == pytest.approx(1 / 3)


def test_distinct_share_counts_phrases_over_all_answers() -> None:
    assert distinct_share([answer(1, 2, 3), answer(1, 2, 3)]) == 0.5
    assert distinct_share([answer(1)]) == 1.0


def test_metrics_are_means_over_prompts() -> None:
    samples = SampledAnswers(
        (
            SampledPrompt("p", answer(1, 2, ended=True), answer(*[7] * 13), 3.0),
            SampledPrompt("q", answer(*[7] * 13), answer(5, 6, 7, 2, ended=True), -1.0),
        )
    )
    metrics = samples.metrics()
    assert metrics["samples/kl"] == 1.0
    assert (metrics["samples/lengths/policy"], metrics["samples/lengths/reference"]) == (7.5, 8.5)
    assert (metrics["samples/ended/policy"], metrics["samples/repetition/policy"]) == (0.5, pytest.approx(0.45))
    assert metrics["samples/distinct/reference"] == pytest.approx(3 / 14)
    assert "samples/kl" not in SampledAnswers(samples.prompts, draws_from_policy=False).metrics()
