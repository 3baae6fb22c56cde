"""A step's pairs to ranks and micro-batches: even costs over ranks, token budgets held, no pair lost or repeated.

Pure functions of lengths. Ranks get the same number of pairs (give or take one) and nearly the same work; what a pair
costs is a matter of the model's shape, not of the clock.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Lengths = npt.NDArray[np.uint32]  # [num_pairs, 3]: prompt, chosen, rejected
Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class CostModel:
    """Work of a pair in units of one token's linear layers.

    attention_per_key: what one row seeing one other row costs; 4 * hidden * layers FLOPs over 2 * weights for a plain
    transformer, about 1 / (6 * hidden). shares_prompt: the prompt is computed once, not twice.
    """

    attention_per_key: float
    shares_prompt: bool

    def tokens(self, lengths: Lengths) -> Indices:
        """Rows that each pair takes in a packed row; the last token of a response is left out."""
        prompt, chosen, rejected = (lengths[:, i].astype(np.int64) for i in range(3))
        return prompt * (1 if self.shares_prompt else 2) + np.maximum(chosen - 1, 0) + np.maximum(rejected - 1, 0)

    def costs(self, lengths: Lengths) -> npt.NDArray[np.float64]:
        """Linear work plus attention over the rows that are seen."""
        prompt, chosen, rejected = (lengths[:, i].astype(np.float64) for i in range(3))
        whole_chosen, whole_rejected = prompt + chosen, prompt + rejected
        keys = (whole_chosen**2 + whole_rejected**2) / 2
        if self.shares_prompt:
            keys -= prompt**2 / 2
        return self.tokens(lengths) + self.attention_per_key * keys


def rank_shares(costs: npt.NDArray[np.float64], num_ranks: int) -> npt.NDArray[np.int32]:
    """Give every pair a rank: dealt in rounds from the costliest down, each round's costliest to the least loaded rank.

    The longest-processing-time rule with equal counts, one vector operation a round.
    """
    ranks = np.empty(len(costs), dtype=np.int32)
    loads = np.zeros(num_ranks)
    order = _descending(costs)
    for start in range(0, len(order), num_ranks):
        dealt = order[start : start + num_ranks]
        takers = np.argsort(loads, kind="stable")[: len(dealt)]
        ranks[dealt] = takers
        loads[takers] += costs[dealt]
    return ranks


def _descending(costs: npt.NDArray[np.float64]) -> Indices:
    """Order by cost, to one part in 65,535 of the largest: 16-bit keys sort in linear time."""
    if len(costs) == 0:
        return np.zeros(0, dtype=np.int64)
    keys = (costs * (65_535 / max(costs.max(), 1e-300))).astype(np.uint16)
    return np.argsort(65_535 - keys, kind="stable")


def bin_by_tokens(tokens: Indices, budget: int) -> list[Indices]:
    """Put pairs into as few bins as first-fit finds, longest first; a pair over the budget is alone in its bin."""
    room: list[int] = []
    bins: list[list[int]] = []
    for index in np.argsort(-tokens, kind="stable").tolist():
        size = int(tokens[index])
        place = next((i for i, left in enumerate(room) if left >= size), None)
        if place is None:
            bins.append([index])
            room.append(budget - size)
        else:
            bins[place].append(index)
            room[place] -= size
    return [np.array(sorted(chosen), dtype=np.int64) for chosen in bins]
