"""RPO (Iterative Reasoning Preference Optimization, 2404.19733, Eq. 1): keep the chosen side likely.

Adds rpo_alpha times the chosen side's mean negative log-likelihood per token, so a margin cannot be won by
letting both sides fall.
"""

from torch import Tensor

from thresher.losses.scores import PairScores


def rpo_term(pairs: PairScores, rpo_alpha: float) -> Tensor:
    """Compute rpo_alpha * NLL_w / |y_w|: [num_pairs]."""
    return rpo_alpha * pairs.mean_chosen_nll
