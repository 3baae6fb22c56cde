"""What the data set says about a single pair: how much it counts, and by how much the chosen side should win.

The margin is in units of reward and stands outside beta, as in ODPO (2402.10571) and Llama 2's reward model
(2307.09288, Eq. 2): -logsig(beta z - margin).
"""

import torch
from torch import Tensor


def margin_shift(margin: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Turn the wished margin into a shift of the reward difference: [num_pairs], or None without one."""
    return None if margin is None else -margin.to(dtype)


def weighted(per_pair: Tensor, weight: Tensor | None) -> Tensor:
    """Multiply each pair's loss by its weight; the caller divides by the number of pairs, not by the weights' sum."""
    return per_pair if weight is None else per_pair * weight.to(per_pair.dtype)
