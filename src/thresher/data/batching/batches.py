"""Batches of pairs: micro-batches of a training step on each rank, and blocks of neighbouring pairs to score.

Pure functions of the pair lengths. A step's pairs are assigned to ranks of equal cost, whose numbers of pairs differ by
at most one, and packed into bins under a token budget, a number of pairs, or both. Costs are computed from the model's
dimensions, not measured.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from thresher.data.batching.plan import PairIds
from thresher.data.store.split import Lengths, longest_sequences

Indices = npt.NDArray[np.int64]
Costs = npt.NDArray[np.float64]


@dataclass(frozen=True)
class CostModel:
    """Compute cost of an example, in units of the linear layers for one token; an absent response has length 0."""

    # of one query and key: in a plain transformer 4 * hidden * layers FLOPs over 2 * weights, about 1 / (6 * hidden)
    attention_per_key: float
    shares_prompt: bool  # the prompt is computed once, not once per response

    def tokens(self, lengths: Lengths) -> Indices:
        """Return the tokens that each example has in a packed row; the last token of a response is not an input."""
        return self.measure(lengths)[0]

    def costs(self, lengths: Lengths) -> Costs:
        """Return the cost of the linear layers plus causal attention, half a square per sequence."""
        return self.measure(lengths)[1]

    def measure(self, lengths: Lengths) -> tuple[Indices, Costs]:
        """Return `tokens` and `costs`."""
        prompt = lengths[:, 0].astype(np.float64)
        count, total, squares = _sums(lengths)
        tokens = prompt * (1 if self.shares_prompt else count) + total - count
        # the squares of prompt + response, of which a shared prompt's is computed once
        squares += prompt * (2 * total + prompt * (1 if self.shares_prompt else count))
        return tokens.astype(np.int64), self.attention_per_key / 2 * squares + tokens


def _sums(lengths: Lengths) -> tuple[Costs, Costs, Costs]:
    """Return each example's number of responses, and the sums of their lengths and of the squares, exact in fp64."""
    # a row per side: numpy adds up long rows several times faster than short ones
    responses = lengths.T[1:].astype(np.float64, order="C")
    count = (responses != 0).sum(axis=0, dtype=np.int16)
    return count.astype(np.float64), responses.sum(axis=0), np.einsum("ij,ij->j", responses, responses)


def num_sequences(lengths: Lengths) -> Indices:
    """Return the number of responses of each example: its rows in a padded batch."""
    counts: Indices = (np.ascontiguousarray(lengths.T[1:]) > 0).sum(axis=0, dtype=np.int64)
    return counts


def assign_ranks(costs: Costs, num_ranks: int) -> npt.NDArray[np.int32]:
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
    # descending, to a precision of 1 / 65,535: 16-bit keys sort in linear time
    order = np.argsort(65_535 - (relative * 65_535).astype(np.uint16), kind="stable")
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


def _in_rounds(sizes: Indices, assigned: npt.NDArray[np.int32]) -> Indices:
    """Return the positions of the examples as [round, rank]: each rank's largest in the first round.

    Of equal ones, the first in the plan. A rank without an example in the last round has -1 there.
    """
    counts = np.bincount(assigned)
    largest = int(sizes.max())
    position_bits, size_bits = len(sizes).bit_length(), largest.bit_length()
    if position_bits + size_bits + len(counts).bit_length() < 63:
        # three times faster than lexsort
        keys = ((assigned.astype(np.int64) << size_bits) + (largest - sizes) << position_bits) + np.arange(len(sizes))
        keys.sort()
        order = keys & ((1 << position_bits) - 1)
    else:
        order = np.lexsort((-sizes, assigned))
    rounds = np.full((len(counts), int(counts.max())), -1, dtype=np.int64)
    rounds[np.arange(rounds.shape[1]) < counts[:, None]] = order
    return np.ascontiguousarray(rounds.T)


def most_bins(tokens: Indices, assigned: npt.NDArray[np.int32], budget: int) -> int:
    """Return the number of bins that `bin_by_tokens` makes on the rank that has most, for all ranks at once.

    Only sizes matter: which of equal pairs or of equally full bins comes first changes no number of bins.
    """
    # two bins of a rank hold more than the budget together, so k bins hold more than k / 2 budgets
    totals = np.bincount(assigned, weights=np.minimum(tokens, budget)).astype(np.int64)
    least = max(1, -(-int(totals.max()) // budget))
    may_have_more = 2 * totals >= (least + 1) * budget
    if not may_have_more.any():
        return least
    if not may_have_more.all():
        number = np.cumsum(may_have_more, dtype=np.int32) - 1
        is_counted = may_have_more.take(assigned)
        tokens, assigned = tokens[is_counted], number.take(assigned[is_counted])
    rounds = _in_rounds(tokens, assigned)
    ranks, bits, none = np.arange(rounds.shape[1]), len(rounds).bit_length(), np.iinfo(np.int64).max
    rooms = np.full((len(rounds) + 1, len(ranks)), none)  # room << bits | bin
    num_bins = np.zeros(len(ranks), dtype=np.int64)
    for positions in rounds:
        sizes, opened = tokens.take(positions), rooms[: int(num_bins.max())]
        fullest = np.where(opened >= sizes << bits, opened, none).min(axis=0, initial=none)
        is_new = fullest == none
        chosen = np.where(is_new, num_bins, fullest & ((1 << bits) - 1))
        # negative, and so closed, for a pair over the budget
        rooms[chosen, ranks] = (np.where(is_new, budget, fullest >> bits) - sizes << bits) + chosen
        num_bins += is_new & (positions >= 0)
    return max(least, int(num_bins.max()))


def most_padded_batches(
    widths: Indices, num_rows: Indices, assigned: npt.NDArray[np.int32], max_pairs: int, max_tokens: int
) -> int:
    """Return the number of padded batches of the rank that has most, for all ranks at once."""
    rounds = _in_rounds(widths, assigned)
    num_batches, pairs, rows, most_rows = np.zeros((4, rounds.shape[1]), dtype=np.int64)
    for positions in rounds:
        added = num_rows.take(positions)
        starts = (num_batches == 0) | (pairs == max_pairs) | (rows + added > most_rows)
        pairs, rows = np.where(starts, 0, pairs) + 1, np.where(starts, 0, rows) + added
        most_rows = np.where(starts, max_tokens // widths.take(positions), most_rows)
        num_batches += starts & (positions >= 0)
    return int(num_batches.max())


# fewer pairs are computed at a time: arrays that fit into the cache take half the time
_PAIRS_PER_BLOCK = 16_384


@dataclass(frozen=True)
class MicroBatching:
    """Assignment of pairs to ranks and micro-batches."""

    lengths: Lengths  # [examples in the store, (prompt, response, response...)] in tokens
    costs: CostModel
    max_tokens: int | None = None  # token budget of a micro-batch
    max_pairs: int | None = None  # pairs per padded micro-batch; None for packed rows

    def split(self, pair_ids: PairIds, rank: int, num_ranks: int) -> list[PairIds]:
        """Return the pair ids of each micro-batch of a rank; every pair is in one micro-batch of one rank."""
        return self.split_ranks(pair_ids, [rank], num_ranks)[0]

    def split_in_lockstep(self, pair_ids: PairIds, rank: int, num_ranks: int) -> list[PairIds]:
        """The same, with empty micro-batches up to the number of the rank that has most.

        Those of the other ranks are counted, and only this rank's pairs are put into bins.
        """
        if num_ranks == 1:
            return self._split_rank(pair_ids)
        blocks, tokens, assigned = self._assign(pair_ids, num_ranks)
        own = self._split_rank(pair_ids[assigned == rank])
        return [*own, *[pair_ids[:0]] * (self._count_most(blocks, tokens, assigned) - len(own))]

    def split_ranks(self, pair_ids: PairIds, ranks: Sequence[int], num_ranks: int) -> list[list[PairIds]]:
        """The same for several ranks, with one assignment of the pairs."""
        if num_ranks == 1:
            return [self._split_rank(pair_ids) for _ in ranks]
        assigned = self._assign(pair_ids, num_ranks)[2]
        return [self._split_rank(pair_ids[assigned == rank]) for rank in ranks]

    def _split_rank(self, pair_ids: PairIds) -> list[PairIds]:
        if len(pair_ids) == 0:
            return []
        if self.max_pairs is None:
            budget = np.iinfo(np.int64).max if self.max_tokens is None else self.max_tokens
            bins = bin_by_tokens(self.costs.tokens(self.lengths[pair_ids]), int(budget))
            return [pair_ids[indices] for indices in bins]
        if self.max_tokens is None:
            return [pair_ids[i : i + self.max_pairs] for i in range(0, len(pair_ids), self.max_pairs)]
        return self._split_padded(pair_ids, self.max_pairs, self.max_tokens)

    def _assign(self, pair_ids: PairIds, num_ranks: int) -> tuple[list[Lengths], Indices, npt.NDArray[np.int32]]:
        """Return the lengths of all pairs in blocks, and the tokens and the rank of each pair."""
        starts = range(0, len(pair_ids), _PAIRS_PER_BLOCK)
        # np.take is three times faster than indexing a memory map
        blocks = [np.take(self.lengths, pair_ids[i : i + _PAIRS_PER_BLOCK], axis=0) for i in starts]
        tokens, costs = (np.concatenate(each) for each in zip(*map(self.costs.measure, blocks), strict=True))
        return blocks, tokens, assign_ranks(costs, num_ranks)

    def _count_most(self, blocks: list[Lengths], tokens: Indices, assigned: npt.NDArray[np.int32]) -> int:
        """Return the number of micro-batches of the rank that has most."""
        if self.max_pairs is None:
            return 1 if self.max_tokens is None else most_bins(tokens, assigned, self.max_tokens)
        if self.max_tokens is None:
            return -(-int(np.bincount(assigned).max()) // self.max_pairs)
        widths, num_rows = (np.concatenate(list(map(each, blocks))) for each in (longest_sequences, num_sequences))
        return most_padded_batches(widths, num_rows, assigned, self.max_pairs, self.max_tokens)

    def _split_padded(self, pair_ids: PairIds, max_pairs: int, max_tokens: int) -> list[PairIds]:
        """Fill padded batches from the longest pair down, so pairs of similar length share a batch."""
        lengths = self.lengths[pair_ids]
        widths = longest_sequences(lengths)
        order = np.argsort(-widths, kind="stable")
        rows = np.cumsum(num_sequences(lengths)[order])
        batches, start = [], 0
        while start < len(order):
            # a row per response, padded to the width of the first example
            most_rows = (rows[start - 1] if start else 0) + max_tokens // int(widths[order[start]])
            fitting = int(np.searchsorted(rows, most_rows, side="right")) - start
            stop = start + max(1, min(max_pairs, fitting))
            batches.append(pair_ids[np.sort(order[start:stop])])
            start = stop
        return batches


_ROWS_PER_CHUNK = 1 << 18  # whose lengths are in memory at the same time


class Blocks:
    """Consecutive blocks that cover a store, computed a chunk of rows at a time.

    For scoring without a gradient: evaluation, and a reference that is computed in advance.
    """

    def __init__(self, chunks: Sequence[int], ends_in: Callable[[int], PairIds]) -> None:
        """Take the number of rows of each chunk, and a function that returns the ends of the blocks in a chunk."""
        self._starts = np.cumsum([0, *chunks])
        self._ends_in = ends_in  # relative to the chunk's start, in ascending order; rows after the last go on

    @classmethod
    def concatenated(cls, parts: Sequence[Blocks]) -> Blocks:
        """The blocks of several stores as those of one."""
        firsts = np.cumsum([0, *(len(part._starts) - 1 for part in parts)])

        def ends_in(chunk: int) -> PairIds:
            part = int(np.searchsorted(firsts, chunk, side="right")) - 1
            return parts[part]._ends_in(chunk - int(firsts[part]))

        return cls(np.concatenate([np.diff(part._starts) for part in parts]).tolist(), ends_in)

    @classmethod
    def by_pairs(cls, num_pairs: int, pairs_per_block: int) -> Blocks:
        chunks = _chunks(num_pairs, max(1, _ROWS_PER_CHUNK // pairs_per_block) * pairs_per_block)
        return cls(
            chunks, lambda chunk: np.append(np.arange(pairs_per_block, chunks[chunk], pairs_per_block), chunks[chunk])
        )

    @classmethod
    def by_tokens(cls, num_pairs: int, tokens_of: Callable[[slice], Indices], budget: int) -> Blocks:
        """Make blocks of nearly equal numbers of tokens, about the budget each; tokens_of counts those of some pairs.

        Equal, because small matrix products round differently in bf16: a short last block would be noisier.
        """
        chunks = _chunks(num_pairs, _ROWS_PER_CHUNK)
        starts = np.cumsum([0, *chunks])

        def tokens_in(chunk: int) -> Indices:
            return tokens_of(slice(int(starts[chunk]), int(starts[chunk + 1])))

        @cache
        def tokens_before() -> PairIds:
            return np.cumsum([0, *(int(tokens_in(chunk).sum()) for chunk in range(len(chunks)))])

        def ends_in(chunk: int) -> PairIds:
            before, after = tokens_before()[chunk : chunk + 2].tolist()
            total = int(tokens_before()[-1])
            num_blocks = max(1, -(-total // budget))
            per_block = total / num_blocks
            # block k ends with the pair that reaches k * per_block; one number more on each side, for the rounding
            first, last = (int(tokens / max(per_block, 1)) for tokens in (before, after))
            reached = np.arange(max(1, first - 1), min(num_blocks, last + 2)) * per_block
            reached = reached[(reached > before) & (reached <= after)]
            ends = np.searchsorted(before + np.cumsum(tokens_in(chunk)), reached) + 1
            is_last = chunk == len(chunks) - 1
            return np.unique(np.append(ends, chunks[chunk : chunk + is_last])).astype(np.int64)

        return cls(chunks, ends_in)

    def chunks(self) -> Iterator[PairIds]:
        """Yield the edges of some blocks at a time: the first is where these begin, the last where they end."""
        start = 0
        for chunk, first in enumerate(self._starts[:-1].tolist()):
            edges = np.append(start, first + self._ends_in(chunk))
            if len(edges) > 1:
                start = int(edges[-1])
                yield edges

    @property
    def edges(self) -> PairIds:
        """Return all edges; block i contains the pairs from edges[i] up to edges[i + 1]."""
        return np.concatenate([np.zeros(1, dtype=np.int64), *(edges[1:] for edges in self.chunks())])


def _chunks(num_pairs: int, size: int) -> list[int]:
    return [min(size, num_pairs - start) for start in range(0, num_pairs, size)]


@dataclass(frozen=True)
class ScoringBatching:
    """How pairs that are only scored are batched."""

    max_tokens: int  # budget of a batch, with padding; a longer pair gets a batch to itself
    max_pairs: int | None = None  # None: as many as the budget allows
    costs: CostModel | None = None  # counts the tokens of pairs in packed rows; None if rows are padded

    def blocks(self, lengths: Lengths) -> Blocks:
        """Cut examples into blocks; lengths [examples, (prompt, response, response...)]."""
        costs = self.costs
        if self.max_pairs is None and costs is not None:
            return Blocks.by_tokens(len(lengths), lambda rows: costs.tokens(lengths[rows]), self.max_tokens)
        # blocks are cut in half, so those of different chunks are independent
        max_pairs = self.max_pairs or max(1, len(lengths))
        chunks = _chunks(len(lengths), max(1, _ROWS_PER_CHUNK // max_pairs) * max_pairs)
        starts = np.cumsum([0, *chunks])

        def ends_in(chunk: int) -> PairIds:
            start, stop = starts[chunk : chunk + 2].tolist()
            edges = np.append(np.arange(0, stop - start, max_pairs), stop - start)
            return self._halved(edges, lengths[start:stop])[1:]

        return Blocks(chunks, ends_in)

    def _halved(self, edges: PairIds, lengths: Lengths) -> PairIds:
        """Cut blocks of several pairs in half, until each is within the budget."""
        while (is_too_large := self._is_too_large(edges, lengths)).any():
            starts, sizes = edges[:-1][is_too_large], np.diff(edges)[is_too_large]
            edges = np.sort(np.append(edges, starts + sizes // 2))
        return edges

    def _is_too_large(self, edges: PairIds, lengths: Lengths) -> npt.NDArray[np.bool_]:
        starts = edges[:-1]
        if self.costs is not None:
            tokens = np.add.reduceat(self.costs.tokens(lengths), starts)
        else:
            widths = longest_sequences(lengths)
            tokens = np.add.reduceat(num_sequences(lengths), starts) * np.maximum.reduceat(widths, starts)
        is_too_large: npt.NDArray[np.bool_] = (tokens > self.max_tokens) & (np.diff(edges) > 1)
        return is_too_large
