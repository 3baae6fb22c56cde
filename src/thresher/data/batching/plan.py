"""The plan: which pairs a step trains on, as a pure function of (number of pairs, seed, step).

The set of pairs in a step does not depend on ranks, micro-batches or anything that ran before, so a run can stop
anywhere, resume on another world size and see the same steps. O(step) work and memory: no epoch is ever materialised.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from thresher.errors import UserError

PairIds = npt.NDArray[np.int64]
# even, for the halves' widths. Of 5 pairs, whose halves are smallest, 20,000 seeds show some orders to be likelier than
# others after 8 or 10 rounds (chi-square 7 to 26 deviations high), and no longer after 12. Wide halves need fewer: the
# trace that 4 rounds leave is gone after 6, up to one part in the 4,096 values or more that such a half has
_ROUNDS, _ROUNDS_OF_WIDE_HALVES, _WIDE_BITS = 12, 6, 24
# named together: four arrays of 32 bits that stay in a core's cache
_PAIRS_AT_ONCE = 32_768
_Numbers = npt.NDArray[np.unsignedinteger[Any]]  # 32 bits each where the set allows, else 64


@dataclass(frozen=True)
class Plan:
    """Steps over `num_pairs` pairs; each epoch is a fresh permutation and its last step holds the remainder."""

    num_pairs: int
    seed: int
    pairs_per_step: int
    num_steps: int

    @property
    def steps_per_epoch(self) -> int:
        return math.ceil(self.num_pairs / self.pairs_per_step)

    @property
    def num_epochs(self) -> float:
        return self.num_steps / self.steps_per_epoch

    def epoch_of(self, step: int) -> float:
        """Epochs finished before `step` steps are done, as a fraction."""
        return step / self.steps_per_epoch

    def pair_ids(self, step: int) -> PairIds:
        """Name the pairs of a step (counted from 0), in plan order."""
        if not 0 <= step < self.num_steps:
            raise IndexError(f"step {step} is outside the plan of {self.num_steps} steps")
        epoch, step_in_epoch = divmod(step, self.steps_per_epoch)
        start = step_in_epoch * self.pairs_per_step
        stop = min(start + self.pairs_per_step, self.num_pairs)
        return permuted(np.arange(start, stop, dtype=np.uint64), self.num_pairs, self.seed, epoch)

    def visited_pairs(self) -> PairIds:
        """Every pair that some step of the plan holds, in ascending order."""
        if self.num_steps >= self.steps_per_epoch:
            return np.arange(self.num_pairs, dtype=np.int64)
        return np.sort(np.concatenate([self.pair_ids(step) for step in range(self.num_steps)]))

    @property
    def num_visits(self) -> int:
        """Pairs trained on over the whole plan, repeats counted."""
        epochs, steps = divmod(self.num_steps, self.steps_per_epoch)
        return epochs * self.num_pairs + min(steps * self.pairs_per_step, self.num_pairs)


def make_plan(
    num_pairs: int, *, seed: int, pairs_per_step: int, max_steps: int | None, num_epochs: float | None
) -> Plan:
    """Resolve the horizon, in optimizer steps: whichever of the two limits ends first, one epoch with neither."""
    if num_pairs < pairs_per_step:
        raise UserError(
            f"the training set has {num_pairs} pairs, fewer than one global batch of {pairs_per_step}; lower "
            "actor_train.training_args.global_batch_size, or per_device_train_batch_size and "
            "gradient_accumulation_steps, or add data"
        )
    steps_per_epoch = math.ceil(num_pairs / pairs_per_step)
    limits = [] if max_steps is None else [max_steps]
    if num_epochs is not None or max_steps is None:
        # rounded up: half an epoch of three steps is two steps, never none
        limits.append(math.ceil(round((1.0 if num_epochs is None else num_epochs) * steps_per_epoch, 6)))
    return Plan(num_pairs, seed, pairs_per_step, max(1, min(limits)))


def permuted(positions: npt.NDArray[np.uint64], size: int, seed: int, epoch: int) -> PairIds:
    """Map positions through a pseudo-random permutation of range(size), without building it.

    A Feistel network permutes the next power of two, which is below 2 * size from three pairs on; values outside the
    range walk the cycle until they are in.
    """
    bits = max(2, (size - 1).bit_length())  # each half needs a bit
    num_rounds = _ROUNDS if bits < _WIDE_BITS else _ROUNDS_OF_WIDE_HALVES
    keys = np.random.Generator(np.random.Philox(key=[seed, epoch])).integers(0, 2**32, num_rounds, dtype=np.uint32)
    values: _Numbers = positions.astype(np.uint32 if bits <= 32 else np.uint64)
    for start in range(0, len(values), _PAIRS_AT_ONCE):
        values[start : start + _PAIRS_AT_ONCE] = _feistel(values[start : start + _PAIRS_AT_ONCE], bits, keys)
    outside = np.flatnonzero(values >= size)
    while len(outside):
        walked = _feistel(values[outside], bits, keys)
        values[outside] = walked
        outside = outside[walked >= size]
    return values.astype(np.int64)


def _feistel(values: _Numbers, bits: int, keys: npt.NDArray[np.uint32]) -> _Numbers:
    """Permute range(2**bits); an odd bit makes the left half the wider one.

    Halves trade places, and widths, every round; after an even number of rounds the widths are where they began.
    """
    word, right_bits = values.dtype.type, bits // 2
    left = (values >> word(right_bits)).astype(np.uint32, copy=False)
    right = (values & word((1 << right_bits) - 1)).astype(np.uint32, copy=False)
    masks = (_constant((1 << (bits - right_bits)) - 1), _constant((1 << right_bits) - 1))
    mixed, scratch = np.empty_like(left), np.empty_like(left)
    for turn in range(len(keys)):
        _mix(right, keys[turn : turn + 1], mixed, scratch)
        np.bitwise_and(mixed, masks[turn % 2], mixed)
        np.bitwise_xor(left, mixed, left)
        left, right = right, left
    return (left.astype(word, copy=False) << word(right_bits)) | right


def _constant(value: int) -> npt.NDArray[np.uint32]:
    """An array of no dimensions, which a call takes in half the time of a scalar: most calls of a walk are short."""
    return np.array(value, dtype=np.uint32)


_OUTER_SHIFT, _INNER_SHIFT = _constant(16), _constant(15)
_FIRST_MULTIPLIER, _SECOND_MULTIPLIER = _constant(0x7FEB352D), _constant(0x846CA68B)


def _mix(
    values: npt.NDArray[np.uint32],
    key: npt.NDArray[np.uint32],
    mixed: npt.NDArray[np.uint32],
    scratch: npt.NDArray[np.uint32],
) -> None:
    """Put the lowbias32 finaliser (Wellons, "Prospecting for Hash Functions", 2018) of value + key into `mixed`.

    32 bits hold a half of any size up to 2**63, and go through twice as many lanes at once as 64.
    """
    np.add(values, key, mixed)
    np.bitwise_xor(mixed, np.right_shift(mixed, _OUTER_SHIFT, scratch), mixed)
    np.multiply(mixed, _FIRST_MULTIPLIER, mixed)
    np.bitwise_xor(mixed, np.right_shift(mixed, _INNER_SHIFT, scratch), mixed)
    np.multiply(mixed, _SECOND_MULTIPLIER, mixed)
    np.bitwise_xor(mixed, np.right_shift(mixed, _OUTER_SHIFT, scratch), mixed)
