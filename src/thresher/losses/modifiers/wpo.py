"""WPO (2406.11827, Eq. 2 with sampled alignment): pairs that the policy would write itself count more.

w(y) = exp(mean over tokens of log p(y_t) - log sum_v p(v)^2): the likelihood against what the policy's own samples
would get, so that flat distributions aren't punished. A pair's weight is w(y_w) w(y_l); no gradient passes through it.
"""

import torch
from torch import Tensor

from thresher.errors import UserError
from thresher.losses.pairs import ResponseLogps, SidesLogps, segment_sums


def pair_weights(policy: SidesLogps) -> Tensor:
    """Weigh each pair by how likely the policy is to have written both sides: [num_pairs], detached."""
    with torch.no_grad():
        return (_mean_alignment(policy.chosen) + _mean_alignment(policy.rejected)).exp()


def _mean_alignment(side: ResponseLogps) -> Tensor:
    if side.log_collision is None:
        raise UserError(
            "wpo needs log_collision beside the policy's logps, and the pairs carry none; "
            "score the policy with log_collision, as Objective.needs_log_collision asks, or set wpo: false"
        )
    aligned = side.values - side.log_collision
    return segment_sums(aligned, side.lengths) / side.lengths.clamp(min=1)
