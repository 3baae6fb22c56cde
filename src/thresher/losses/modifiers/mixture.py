"""MPO (2411.10442): a weighted sum of losses over the same pairs."""

from collections.abc import Sequence

from torch import Tensor

from thresher.losses.protocol import Loss
from thresher.losses.scores import PairScores


def mixture(terms: Sequence[tuple[Loss, float]], pairs: PairScores) -> Tensor:
    """Sum weight * loss over the terms: [num_pairs]."""
    (first, weight), *rest = terms
    total = weight * first(pairs)
    for loss, weight in rest:
        total = total + weight * loss(pairs)
    return total
