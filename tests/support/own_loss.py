"""A loss as a user writes one: `pref_loss: tests/support/own_loss.py:squared`."""

from __future__ import annotations

from torch import Tensor


def squared(pairs, target: float = 1.0) -> Tensor:
    return (pairs.log_ratios.margin - target) ** 2
