"""Training plan: the pairs of a step as a pure function of (number of pairs, seed, step).

They do not depend on ranks, micro-batches or earlier steps, so a run can stop anywhere, resume with a different world
size and train on the same steps. Time and memory are O(pairs per step): the permutation of an epoch is never
materialized.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from thresher.data.batching.curriculum import Curriculum
from thresher.errors import UserError

PairIds = npt.NDArray[np.int64]
# Rounds are even because `_feistel` swaps the widths of the halves. With 5 pairs, the narrowest halves, a chi-square
# test over 20,000 seeds finds a bias after 8 and 10 rounds (7 to 26 standard deviations) and none after 12. Halves of
# 12 bits or more need fewer: the bias left by 4 rounds is not detectable after 6.
_ROUNDS, _ROUNDS_OF_WIDE_HALVES, _WIDE_BITS = 12, 6, 24
# permuted together: four 32-bit arrays of this length fit into a core's cache
_PAIRS_PER_BLOCK = 32_768
_ROWS_PER_CHUNK = 1 << 20  # of a store, in memory at the same time
# keys of permutations: epochs of sources, and the order that is fixed for the run
_SOURCE_SHIFT, _FIXED_ORDER = 40, 1 << 62
Order = Literal["proportional", "sequential"]
_Values = npt.NDArray[np.unsignedinteger[Any]]  # uint32 if the number of pairs allows, else uint64


@dataclass(frozen=True)
class Share:
    """A source of a mixture: how many examples it has, and how many of them an epoch visits."""

    size: int
    count: int

    def rows(self, draws: npt.NDArray[np.uint64], seed: int, epoch: int, source: int) -> PairIds:
        """Return the rows of the draws of an epoch, which are numbered from 0.

        An epoch visits each row `count // size` times, and the rest of its draws take the next rows of an order that
        is fixed for the run: in an epoch, and over the run, the visits of two rows differ by at most one.
        """
        positions = permuted(draws, self.count, seed, epoch + (source << _SOURCE_SHIFT))
        rest = self.count % self.size
        if rest == 0:
            return positions % self.size
        taken = positions < rest
        rows = np.where(taken, 0, (positions - rest) % self.size)
        rows[taken] = self._in_fixed_order((epoch * rest + positions[taken]) % self.size, seed, source)
        return rows

    def visited(self, num_epochs: int, seed: int, source: int) -> Iterator[PairIds]:
        """Yield the distinct rows of the first epochs, some at a time."""
        is_whole = num_epochs > 0 and num_epochs * self.count >= self.size
        num_rows = self.size if is_whole else num_epochs * self.count
        for start in range(0, num_rows, _ROWS_PER_CHUNK):
            rows = np.arange(start, min(start + _ROWS_PER_CHUNK, num_rows))
            yield rows if is_whole else self._in_fixed_order(rows, seed, source)

    def _in_fixed_order(self, positions: PairIds, seed: int, source: int) -> PairIds:
        return permuted(positions.astype(np.uint64), self.size, seed, _FIXED_ORDER + source)


@dataclass(frozen=True)
class PairSet:
    """Some of the examples of a store, with one bit per example, or all of them."""

    num_pairs: int  # in the store
    bits: npt.NDArray[np.uint8] | None = None  # None for all

    @classmethod
    def of(cls, num_pairs: int, pair_ids: PairIds) -> PairSet:
        bits = np.zeros(-(-num_pairs // 8), dtype=np.uint8)
        _set_bits(bits, pair_ids)
        return cls(num_pairs, bits)

    def __len__(self) -> int:
        return self.num_pairs if self.bits is None else int(np.bitwise_count(self.bits).sum(dtype=np.int64))

    @property
    def is_all(self) -> bool:
        return self.bits is None

    def mask(self, start: int, stop: int) -> npt.NDArray[np.bool_]:
        """Return whether each of some consecutive examples is in the set."""
        if self.bits is None:
            return np.ones(stop - start, dtype=np.bool_)
        first = start - start % 8
        bits = np.unpackbits(self.bits[first // 8 : -(-stop // 8)], bitorder="little")
        return bits[start - first : stop - first].view(np.bool_)

    def ranges(self) -> Iterator[tuple[int, int]]:
        """Yield ranges of examples that together are the store, from and to."""
        for start in range(0, self.num_pairs, _ROWS_PER_CHUNK):
            yield start, min(start + _ROWS_PER_CHUNK, self.num_pairs)


def _set_bits(bits: npt.NDArray[np.uint8], pair_ids: PairIds) -> None:
    np.bitwise_or.at(bits, pair_ids >> 3, np.left_shift(1, pair_ids & 7).astype(np.uint8))


@dataclass(frozen=True)
class Plan:
    """Steps over `num_pairs` pairs; each epoch is a new permutation and its last step has the remainder.

    Of several sources, every step has each source's share of the epoch, to about one pair, or the epoch visits one
    source after the other. A curriculum sorts the pairs of each epoch. The pairs of the second source are numbered
    after those of the first, and so on.
    """

    num_pairs: int  # of an epoch, counting repeats
    seed: int
    pairs_per_step: int
    num_steps: int
    shares: tuple[Share, ...] = ()  # none: one source, all of which an epoch visits
    order: Order = "proportional"
    curriculum: Curriculum | None = None

    @property
    def steps_per_epoch(self) -> int:
        return math.ceil(self.num_pairs / self.pairs_per_step)

    def epoch_of(self, step: int) -> float:
        """Return the epochs completed after `step` steps, as a fraction."""
        return step / self.steps_per_epoch

    def pair_ids(self, step: int) -> PairIds:
        """Return the pair ids of a step (counted from 0), in plan order."""
        if not 0 <= step < self.num_steps:
            raise IndexError(f"step {step} is outside the plan of {self.num_steps} steps")
        epoch, step_in_epoch = divmod(step, self.steps_per_epoch)
        start = step_in_epoch * self.pairs_per_step
        stop = min(start + self.pairs_per_step, self.num_pairs)
        if self.curriculum is not None:
            return self.curriculum.in_epoch(epoch, lambda: self._between(epoch, 0, self.num_pairs))[start:stop]
        return self._between(epoch, start, stop)

    def _between(self, epoch: int, start: int, stop: int) -> PairIds:
        """Return the pair ids of some positions of an epoch."""
        shares = self._shares
        firsts, lasts = self._draws_before(start), self._draws_before(stop)
        parts, offset = [], 0
        for source, (share, first, last) in enumerate(zip(shares, firsts, lasts, strict=True)):
            parts.append(offset + share.rows(np.arange(first, last, dtype=np.uint64), self.seed, epoch, source))
            offset += share.size
        return np.concatenate(parts)

    def _draws_before(self, position: int) -> list[int]:
        """Return how many draws of each source an epoch makes before a position."""
        counts = [share.count for share in self._shares]
        if self.order == "sequential":
            ends = np.cumsum(counts).tolist()
            return [min(max(position - end + count, 0), count) for end, count in zip(ends, counts, strict=True)]
        return allocate(position, counts)

    @property
    def _shares(self) -> tuple[Share, ...]:
        return self.shares or (Share(self.num_pairs, self.num_pairs),)

    def visited_pairs(self) -> PairSet:
        """Return the distinct pairs of all steps."""
        epochs, steps = divmod(self.num_steps, self.steps_per_epoch)
        num_rows = sum(share.size for share in self._shares)
        if all(epochs * share.count >= share.size for share in self._shares):
            return PairSet(num_rows)
        bits, offset = np.zeros(-(-num_rows // 8), dtype=np.uint8), 0
        for source, share in enumerate(self._shares):
            for rows in share.visited(epochs, self.seed, source):
                _set_bits(bits, offset + rows)
            offset += share.size
        if self.curriculum is not None:
            for step in range(self.num_steps - steps, self.num_steps):
                _set_bits(bits, self.pair_ids(step))
            return PairSet(num_rows, bits)
        stop = min(steps * self.pairs_per_step, self.num_pairs)
        for start in range(0, stop, _ROWS_PER_CHUNK):
            _set_bits(bits, self._between(epochs, start, min(start + _ROWS_PER_CHUNK, stop)))
        return PairSet(num_rows, bits)

    @property
    def num_visits(self) -> int:
        """Number of pairs in all steps, counting repeats."""
        epochs, steps = divmod(self.num_steps, self.steps_per_epoch)
        return epochs * self.num_pairs + min(steps * self.pairs_per_step, self.num_pairs)


def allocate(position: int, counts: Sequence[int]) -> list[int]:
    """Divide the first `position` draws of an epoch among sources in proportion to their counts.

    Draw d of a source with n draws is due at (2d + 1) / 2n, and earlier draws come first: the method of Webster and
    Sainte-Lague, whose allocations only grow with the position. Exact, in integers.
    """
    total = sum(counts)
    # all that are due at position / total; rounding makes this a few more or less than the position
    drawn = [(2 * count * position + total) // (2 * total) for count in counts]
    missing = position - sum(drawn)
    while missing > 0:
        due = [(Fraction(2 * d + 1, 2 * n), at) for at, (d, n) in enumerate(zip(drawn, counts, strict=True)) if d < n]
        drawn[min(due)[1]] += 1
        missing -= 1
    while missing < 0:
        due = [(Fraction(2 * d - 1, 2 * n), at) for at, (d, n) in enumerate(zip(drawn, counts, strict=True)) if d > 0]
        drawn[max(due)[1]] -= 1
        missing += 1
    return drawn


def make_plan(
    num_pairs: int,
    *,
    seed: int,
    pairs_per_step: int,
    max_steps: int | None,
    num_epochs: float | None,
    shares: tuple[Share, ...] = (),
    order: Order = "proportional",
    curriculum: Curriculum | None = None,
) -> Plan:
    """Build the plan; it ends at the earlier of the two limits, or after one epoch if neither is given."""
    if num_pairs < pairs_per_step:
        raise UserError(
            f"the training set has {num_pairs} pairs, fewer than one global batch of {pairs_per_step}; lower "
            "actor_train.training_args.global_batch_size, or per_device_train_batch_size and "
            "gradient_accumulation_steps, or add data"
        )
    steps_per_epoch = math.ceil(num_pairs / pairs_per_step)
    limits = [] if max_steps is None else [max_steps]
    if num_epochs is not None or max_steps is None:
        # rounded up: half an epoch of three steps is two steps, and a plan has at least one step
        limits.append(math.ceil(round((1.0 if num_epochs is None else num_epochs) * steps_per_epoch, 6)))
    return Plan(num_pairs, seed, pairs_per_step, max(1, min(limits)), shares, order, curriculum)


def permuted(positions: npt.NDArray[np.uint64], size: int, seed: int, epoch: int) -> PairIds:
    """Map positions through a pseudo-random permutation of range(size) without materializing it.

    A Feistel network permutes the next power of two, which is below 2 * size from three pairs on. Cycle walking: values
    outside the range are permuted again until they are inside.
    """
    bits = max(2, (size - 1).bit_length())  # each half has at least one bit
    num_rounds = _ROUNDS if bits < _WIDE_BITS else _ROUNDS_OF_WIDE_HALVES
    keys = np.random.Generator(np.random.Philox(key=[seed, epoch])).integers(0, 2**32, num_rounds, dtype=np.uint32)
    values: _Values = positions.astype(np.uint32 if bits <= 32 else np.uint64)
    for start in range(0, len(values), _PAIRS_PER_BLOCK):
        values[start : start + _PAIRS_PER_BLOCK] = _feistel(values[start : start + _PAIRS_PER_BLOCK], bits, keys)
    outside = np.flatnonzero(values >= size)
    while len(outside):
        walked = _feistel(values[outside], bits, keys)
        values[outside] = walked
        outside = outside[walked >= size]
    return values.astype(np.int64)


def _feistel(values: _Values, bits: int, keys: npt.NDArray[np.uint32]) -> _Values:
    """Permute range(2**bits); if bits is odd, the left half is one bit wider.

    The halves and their widths are swapped every round; an even number of rounds restores the widths.
    """
    word, right_bits = values.dtype.type, bits // 2
    left = (values >> word(right_bits)).astype(np.uint32, copy=False)
    right = (values & word((1 << right_bits) - 1)).astype(np.uint32, copy=False)
    masks = (_constant((1 << (bits - right_bits)) - 1), _constant((1 << right_bits) - 1))
    mixed, scratch = np.empty_like(left), np.empty_like(left)
    for number in range(len(keys)):
        _lowbias32(right, keys[number : number + 1], mixed, scratch)
        np.bitwise_and(mixed, masks[number % 2], mixed)
        np.bitwise_xor(left, mixed, left)
        left, right = right, left
    return (left.astype(word, copy=False) << word(right_bits)) | right


def _constant(value: int) -> npt.NDArray[np.uint32]:
    """Return a 0-d array: on the short arrays of cycle walking, a ufunc takes half as long as with a scalar."""
    return np.array(value, dtype=np.uint32)


_OUTER_SHIFT, _INNER_SHIFT = _constant(16), _constant(15)
_FIRST_MULTIPLIER, _SECOND_MULTIPLIER = _constant(0x7FEB352D), _constant(0x846CA68B)


def _lowbias32(
    values: npt.NDArray[np.uint32],
    key: npt.NDArray[np.uint32],
    mixed: npt.NDArray[np.uint32],
    scratch: npt.NDArray[np.uint32],
) -> None:
    """Write the lowbias32 hash (Wellons, "Prospecting for Hash Functions", 2018) of value + key to `mixed`.

    32 bits hold a half of any size up to 2**63 and use twice as many SIMD lanes as 64.
    """
    np.add(values, key, mixed)
    np.bitwise_xor(mixed, np.right_shift(mixed, _OUTER_SHIFT, scratch), mixed)
    np.multiply(mixed, _FIRST_MULTIPLIER, mixed)
    np.bitwise_xor(mixed, np.right_shift(mixed, _INNER_SHIFT, scratch), mixed)
    np.multiply(mixed, _SECOND_MULTIPLIER, mixed)
    np.bitwise_xor(mixed, np.right_shift(mixed, _OUTER_SHIFT, scratch), mixed)
