"""How a knob is checked: one wording for every loss and modifier, with the mend in the text."""

import math

from thresher.errors import UserError


def require_knob(
    owner: str,
    knob: str,
    value: float,
    *,
    above: float | None = None,
    at_least: float | None = None,
    below: float | None = None,
    at_most: float | None = None,
    usual: float,
) -> None:
    """Raise a UserError unless `value` is a finite number within the bounds; `usual` is the mend it names."""
    bounds = [
        f"{word} {bound:g}"
        for word, bound in (("above", above), ("at least", at_least), ("below", below), ("at most", at_most))
        if bound is not None
    ]
    wanted = " and ".join(bounds) or "a finite number"
    # bool is an int to Python, but `beta: true` in a config is a mistake.
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if is_number and (
        (above is None or value > above)
        and (at_least is None or value >= at_least)
        and (below is None or value < below)
        and (at_most is None or value <= at_most)
    ):
        return
    raise UserError(f"{owner}: {knob} must be {wanted}, got {value!r}; try {usual:g}")


def require_beta(owner: str, beta: float, usual: float = 0.1) -> None:
    """Raise a UserError unless beta is above 0."""
    require_knob(owner, "beta", beta, above=0.0, usual=usual)
