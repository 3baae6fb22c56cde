"""Answers to the fixed prompts, and what they measure without a judge: length, ending, repetition, KL."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# tokens of a phrase: shorter ones recur in any text
NGRAM = 4


@dataclass(frozen=True)
class Answer:
    """A generated answer."""

    text: str
    token_ids: tuple[int, ...]  # with the token that ends it, unless it was cut at max_new_tokens
    ended: bool

    @property
    def words(self) -> tuple[int, ...]:
        """The tokens without the one that ends the answer."""
        return self.token_ids[:-1] if self.ended else self.token_ids

    @property
    def repetition(self) -> float:
        """Share of its n-grams that occur earlier in it; 0 if it is shorter than an n-gram."""
        grams = _ngrams(self.words, NGRAM)
        return 1.0 - len(set(grams)) / len(grams) if grams else 0.0


@dataclass(frozen=True)
class SampledPrompt:
    """A prompt and both answers."""

    prompt: str
    policy: Answer
    reference: Answer
    log_ratio: float  # log of policy over reference on the policy's answer, summed over tokens
    prompt_ids: tuple[int, ...] = ()  # with the generation prompt of the chat template

    @property
    def answers(self) -> tuple[Answer, Answer]:
        return self.policy, self.reference


@dataclass(frozen=True)
class SampledAnswers:
    """The answers of one evaluation, in the order of the prompts."""

    prompts: tuple[SampledPrompt, ...]
    draws_from_policy: bool = True  # at temperature 1

    def metrics(self) -> dict[str, float]:
        """Means over the prompts, and the diversity of each side over all of its answers.

        The mean log ratio estimates KL(policy || reference) of a whole answer if answers are drawn from the policy.
        """
        ratio = "samples/kl" if self.draws_from_policy else "samples/log_ratio"
        metrics = {ratio: _mean([each.log_ratio for each in self.prompts])}
        for side in ("policy", "reference"):
            answers: list[Answer] = [getattr(each, side) for each in self.prompts]
            metrics |= {
                f"samples/lengths/{side}": _mean([len(each.token_ids) for each in answers]),
                f"samples/ended/{side}": _mean([each.ended for each in answers]),
                f"samples/repetition/{side}": _mean([each.repetition for each in answers]),
                f"samples/distinct/{side}": distinct_share(answers),
            }
        return metrics


def distinct_share(answers: Sequence[Answer], n: int = 2) -> float:
    """Share of distinct n-grams among all answers (distinct-n, 1510.03055); 1 if there are none."""
    grams = [gram for each in answers for gram in _ngrams(each.words, n)]
    return len(set(grams)) / len(grams) if grams else 1.0


def _ngrams(tokens: Sequence[int], n: int) -> list[tuple[int, ...]]:
    return [tuple(tokens[at : at + n]) for at in range(len(tokens) - n + 1)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
