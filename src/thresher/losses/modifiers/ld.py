"""LD-DPO (2409.06411): tokens beyond the shorter side's length count only ld_alpha.

Both sides keep full weight on their first min(|y_w|, |y_l|) tokens; policy and reference are weighted alike, so a
policy equal to its reference still has margin 0. ld_alpha = 1 is plain DPO, 0 ignores the surplus.
"""

import torch
from torch import Tensor

from thresher.losses.pairs import ResponseLogps, SidesLogps


def shared_length(sides: SidesLogps) -> Tensor:
    """Return the public length of each pair: [num_pairs] int64."""
    return torch.minimum(sides.chosen.lengths, sides.rejected.lengths)


def token_weights(side: ResponseLogps, shared: Tensor, ld_alpha: float) -> Tensor:
    """Weigh each token: 1 within the shared length, ld_alpha after it: [num_tokens]."""
    limits = torch.repeat_interleave(shared, side.lengths, output_size=side.values.numel())
    ones = torch.ones_like(side.values)
    return torch.where(side.positions() < limits, ones, ld_alpha * ones)
