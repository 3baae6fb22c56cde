"""Comparisons of two responses of an example: the pairs that a pairwise loss reads from a list of responses."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from thresher.losses.pairs import ExampleLogps, ObjectiveInputs, concat_logps

Comparisons = Literal["all", "adjacent", "best_worst", "best_rest"]


@dataclass(frozen=True)
class Compared:
    """Comparisons as pairs: the first comparison of every example, then the second of every example, and so on."""

    inputs: ObjectiveInputs
    #: [num_comparisons] 1 for a comparison, 0 where an example has fewer; None in pairs, which have one each
    is_valid: Tensor | None = None

    def per_example(self, per_comparison: Tensor, num_examples: int) -> Tensor:
        """Average the comparisons of each example, which so has the weight of one pair: [num_examples]."""
        if self.is_valid is None:
            return per_comparison
        valid = self.is_valid.to(per_comparison.dtype).view(-1, num_examples)
        return (per_comparison.view(-1, num_examples) * valid).sum(0) / valid.sum(0).clamp(min=1.0)


def compare(inputs: ObjectiveInputs, which: Comparisons) -> Compared:
    """Return the comparisons of each example's responses, which are ordered from the best to the worst.

    Responses of equal value are not compared. The responses are not computed again: both sides refer to their logps.
    """
    values = inputs.values
    if values is None:
        return Compared(inputs)
    num_sides = len(inputs.policy.sides)
    is_present = torch.stack([side.lengths > 0 for side in inputs.policy.sides], 1)
    last = is_present.sum(1) - 1
    pairs = [
        (better, worse)
        for better in range(num_sides)
        for worse in range(better + 1, num_sides)
        if not (which == "adjacent" and worse > better + 1) and not (which in ("best_worst", "best_rest") and better)
    ]
    is_valid = [is_present[:, worse] & (values[:, better] > values[:, worse]) for better, worse in pairs]
    if which == "best_worst":
        is_valid = [valid & (last == worse) for valid, (_, worse) in zip(is_valid, pairs, strict=True)]
    return Compared(
        replace(
            inputs,
            policy=_sides(inputs.policy, pairs),
            reference=None if inputs.reference is None else _sides(inputs.reference, pairs),
            weight=None,
            margin=None if inputs.margin is None else inputs.margin.repeat(len(pairs)),
            values=torch.cat([values[:, [better, worse]] for better, worse in pairs]),
            group=None,
        ),
        torch.cat(is_valid),
    )


def _sides(logps: ExampleLogps, pairs: list[tuple[int, int]]) -> ExampleLogps:
    better, worse = zip(*pairs, strict=True)
    return ExampleLogps.of(*(concat_logps([logps.side(number) for number in side]) for side in (better, worse)))
