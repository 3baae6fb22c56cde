"""Load balancing: assign the pairs of a step to ranks of equal cost and pack them into bins under a token budget.

Pure functions of the pair lengths. The numbers of pairs per rank differ by at most one. Costs are computed from the
model's dimensions, not measured.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from thresher.data.store.reader import Lengths

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class CostModel:
    """Compute cost of a pair, in units of the linear layers for one token.

    attention_per_key: cost of one query attending to one key; 4 * hidden * layers FLOPs over 2 * weights for a plain
    transformer, about 1 / (6 * hidden). shares_prompt: the prompt is computed once, not once per response.
    """

    attention_per_key: float
    shares_prompt: bool

    def tokens(self, lengths: Lengths) -> Indices:
        """Return the tokens that each pair occupies in a packed row; the last token of a response is not an input."""
        prompt, chosen, rejected = (lengths[:, i].astype(np.int64) for i in range(3))
        return prompt * (1 if self.shares_prompt else 2) + np.maximum(chosen - 1, 0) + np.maximum(rejected - 1, 0)

    def costs(self, lengths: Lengths) -> npt.NDArray[np.float64]:
        """Return the cost of the linear layers plus causal attention, half a square per sequence."""
        prompt, chosen, rejected = (lengths[:, i].astype(np.float64) for i in range(3))
        squares = np.square(prompt + chosen) + np.square(prompt + rejected)
        if self.shares_prompt:
            squares -= np.square(prompt)
        return self.attention_per_key / 2 * squares + self.tokens(lengths)


def assign_ranks(costs: npt.NDArray[np.float64], num_ranks: int) -> npt.NDArray[np.int32]:
    """Assign every pair to a rank: in rounds of one pair per rank, each round's costliest to the least loaded rank.

    Longest-processing-time scheduling with equal counts, vectorized per round. Loads are integers with the rank in the
    low bits: sorting them needs no argsort, and since no two are equal, every sort algorithm gives the same result.
    """
    ranks = np.empty(len(costs), dtype=np.int32)
    if len(costs) == 0:
        return ranks
    num_rounds = -(-len(costs) // num_ranks)
    rank_bits, load_bits = (num_ranks - 1).bit_length(), num_rounds.bit_length()
    cost_bits = 62 - rank_bits - load_bits
    relative = costs / max(costs.max(), 1e-300)
    order = _descending(relative)
    # np.take is three times faster than indexing
    units = (relative * 2.0**cost_bits).astype(np.int64).take(order) << rank_bits
    loads = np.arange(num_ranks)  # load << rank_bits | rank
    least_loads = np.empty(len(costs), dtype=np.int64)
    for start in range(0, len(order), num_ranks):
        loads.sort()
        round_units = units[start : start + num_ranks]
        least_loads[start : start + num_ranks] = loads[: len(round_units)]
        loads[: len(round_units)] += round_units
    ranks[order] = least_loads & ((1 << rank_bits) - 1)
    return ranks


def _descending(relative: npt.NDArray[np.float64]) -> Indices:
    """Argsort values in 0..1 from the largest down, to a precision of 1 / 65,535: 16-bit keys sort in linear time."""
    keys = (relative * 65_535).astype(np.uint16)
    return np.argsort(65_535 - keys, kind="stable")


def bin_by_tokens(tokens: Indices, budget: int) -> list[Indices]:
    """Pack pairs into bins by best-fit decreasing; a pair over the budget gets a bin to itself.

    Each pair goes to the fullest bin with enough room. O(n log n) comparisons: open bins stay sorted by room.
    """
    bins: list[list[int]] = []
    # room * stride + bin: integers compare faster than tuples, and the older of two equally full bins is used
    rooms: list[int] = []
    stride = len(tokens) + 1
    order = np.argsort(-tokens, kind="stable")
    least = int(tokens[order[-1]]) if len(order) else 0
    for index, size in zip(order.tolist(), tokens[order].tolist(), strict=True):
        position = bisect_left(rooms, size * stride)
        if position == len(rooms):
            room, chosen = budget, len(bins)
            bins.append([index])
        else:
            room, chosen = divmod(rooms.pop(position), stride)
            bins[chosen].append(index)
        # a bin too full for the shortest pair is closed, which keeps the list short
        if room - size >= least:
            insort(rooms, (room - size) * stride + chosen)
    return [np.array(sorted(chosen), dtype=np.int64) for chosen in bins]
