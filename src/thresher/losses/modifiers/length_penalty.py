"""R-DPO (2403.19159): charge alpha a token in the reward, so that length alone cannot win.

The paper maximises r(x, y) - alpha |y| - beta KL. Its optimum has r = beta log(policy / reference) + alpha |y| + c(x),
so the Bradley-Terry logit is beta z + alpha (|y_w| - |y_l|): outside beta, in units of reward, and with a plus.
Length already explains part of the preference for a longer chosen side, so that pair pulls less; a shorter one more.
"""

from torch import Tensor


def length_shift(chosen_length: Tensor, rejected_length: Tensor, length_penalty: float) -> Tensor | None:
    """Compute alpha (|y_w| - |y_l|): [num_pairs], or None where the penalty is off."""
    return None if length_penalty == 0.0 else length_penalty * (chosen_length - rejected_length)
