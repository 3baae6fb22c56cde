"""The plan: which pairs a step trains on, as a pure function of (number of pairs, seed, step).

The set of pairs in a step does not depend on ranks, micro-batches or anything that ran before, so a run can stop
anywhere, resume on another world size and see the same steps. O(step) work and memory: no epoch is ever materialised.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from thresher.errors import UserError

PairIds = npt.NDArray[np.int64]
_ROUNDS = 8


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
            "actor_train.training_args.per_device_train_batch_size or gradient_accumulation_steps, or add data"
        )
    steps_per_epoch = math.ceil(num_pairs / pairs_per_step)
    limits = [] if max_steps is None else [max_steps]
    if num_epochs is not None or max_steps is None:
        # rounded up: half an epoch of three steps is two steps, never none
        limits.append(math.ceil(round((1.0 if num_epochs is None else num_epochs) * steps_per_epoch, 6)))
    return Plan(num_pairs, seed, pairs_per_step, max(1, min(limits)))


def permuted(positions: npt.NDArray[np.uint64], size: int, seed: int, epoch: int) -> PairIds:
    """Map positions through a pseudo-random permutation of range(size), without building it.

    A Feistel network permutes the next even power of two; values outside the range walk the cycle until they are in.
    """
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    keys = np.random.Generator(np.random.Philox(key=[seed, epoch])).integers(0, 2**63, _ROUNDS, dtype=np.uint64)
    values = positions.copy()
    outside = np.ones(len(values), dtype=bool)
    while outside.any():
        values[outside] = _feistel(values[outside], half_bits, keys)
        outside = values >= size
    return values.astype(np.int64)


def _feistel(values: npt.NDArray[np.uint64], half_bits: int, keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = values >> shift, values & mask
    for key in keys:
        left, right = right, left ^ (_mix(right, key) & mask)
    return (left << shift) | right


def _mix(values: npt.NDArray[np.uint64], key: np.uint64) -> npt.NDArray[np.uint64]:
    """The splitmix64 finaliser over value + key."""
    with np.errstate(over="ignore"):
        mixed = values + key
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return mixed ^ (mixed >> np.uint64(31))
