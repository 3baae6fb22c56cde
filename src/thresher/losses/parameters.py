"""Range checks for the parameters of losses and modifiers, all with the same error message."""

from __future__ import annotations

import dataclasses
import math
import operator
from dataclasses import dataclass

from thresher.errors import UserError

# Marks a dataclass field that changes from step to step and is saved in checkpoints, unlike a parameter set by a user.
STATE = {"state": True}


@dataclass(frozen=True)
class Range:
    """The finite numbers within all given bounds."""

    above: float | None = None
    at_least: float | None = None
    below: float | None = None
    at_most: float | None = None

    def check(self, owner: str, parameter: str, value: float, *, usual: float) -> None:
        """Raise a UserError, which suggests the usual value, unless `value` is a number in this range."""
        bounds = [
            (word, bound, is_within)
            for word, bound, is_within in (
                ("above", self.above, operator.gt),
                ("at least", self.at_least, operator.ge),
                ("below", self.below, operator.lt),
                ("at most", self.at_most, operator.le),
            )
            if bound is not None
        ]
        # bool is an int in Python, but `beta: true` in a config is a mistake.
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not is_number or not all(is_within(value, bound) for _, bound, is_within in bounds):
            expected = " and ".join(f"{word} {bound:g}" for word, bound, _ in bounds) or "a finite number"
            raise UserError(f"{owner}: {parameter} must be {expected}, got {value!r}; try {usual:g}")


FINITE = Range()
POSITIVE = Range(above=0.0)
NON_NEGATIVE = Range(at_least=0.0)
UP_TO_HALF = Range(at_least=0.0, at_most=0.5)


def parameter(default: float, allowed: Range) -> float:
    """Declare a parameter of a loss: a dataclass field with a default and the values it may have."""
    # Typed as its value, like dataclasses.field.
    declared: float = dataclasses.field(default=default, metadata={"allowed": allowed})
    return declared
