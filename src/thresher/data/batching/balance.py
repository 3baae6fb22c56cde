"""A step's pairs to ranks and micro-batches: even costs over ranks, token budgets held, no pair lost or repeated.

Pure functions of lengths. Ranks get the same number of pairs (give or take one) and nearly the same work; what a pair
costs is a matter of the model's shape, not of the clock.
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
        """Linear work plus attention over the keys that are seen: half a square for each sequence."""
        prompt, chosen, rejected = (lengths[:, i].astype(np.float64) for i in range(3))
        squares = np.square(prompt + chosen) + np.square(prompt + rejected)
        if self.shares_prompt:
            squares -= np.square(prompt)
        return self.attention_per_key / 2 * squares + self.tokens(lengths)


def assign_ranks(costs: npt.NDArray[np.float64], num_ranks: int) -> npt.NDArray[np.int32]:
    """Give every pair a rank: dealt in rounds from the costliest down, each round's costliest to the least loaded rank.

    The longest-processing-time rule with equal counts, one vector operation a round. Loads are whole numbers, and
    a rank's own number stands in their low bits: sorting them needs no indices, and no two are equal, so that every
    processor finds the same order with whatever sort it has.
    """
    ranks = np.empty(len(costs), dtype=np.int32)
    if len(costs) == 0:
        return ranks
    num_rounds = -(-len(costs) // num_ranks)
    rank_bits, load_bits = (num_ranks - 1).bit_length(), num_rounds.bit_length()
    cost_bits = 62 - rank_bits - load_bits
    relative = costs / max(costs.max(), 1e-300)
    order = _descending(relative)
    # take: three times faster than indexing
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
    """Order numbers of 0..1 from the largest down, to one part in 65,535: 16-bit keys sort in linear time."""
    keys = (relative * 65_535).astype(np.uint16)
    return np.argsort(65_535 - keys, kind="stable")


def bin_by_tokens(tokens: Indices, budget: int) -> list[Indices]:
    """Put pairs into as few bins as best-fit finds, longest first; a pair over the budget is alone in its bin.

    The fullest bin that still has room takes a pair. O(n log n) comparisons: open bins stay sorted by room.
    """
    bins: list[list[int]] = []
    # room * stride + bin: whole numbers compare faster than tuples, and equal rooms go to the older bin
    rooms: list[int] = []
    stride = len(tokens) + 1
    order = np.argsort(-tokens, kind="stable")
    least = int(tokens[order[-1]]) if len(order) else 0
    for index, size in zip(order.tolist(), tokens[order].tolist(), strict=True):
        place = bisect_left(rooms, size * stride)
        if place == len(rooms):
            room, chosen = budget, len(bins)
            bins.append([index])
        else:
            room, chosen = divmod(rooms.pop(place), stride)
            bins[chosen].append(index)
        # a bin too full for the shortest pair is left out, which keeps the list short
        if room - size >= least:
            insort(rooms, (room - size) * stride + chosen)
    return [np.array(sorted(chosen), dtype=np.int64) for chosen in bins]
