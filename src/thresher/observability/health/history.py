"""The records that the rules compare: the first and the newest training records, and the evaluations.

A window is counted in pairs, not in records or steps, because the noise of a mean depends on the pairs in it: the same
run then gets the same verdict with any logging_steps.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# A mean over 256 pairs has a standard error of 0.03 for an accuracy, and of about 0.05 nats per token for an NLL.
WINDOW_PAIRS = 256
# one batch alone is not a trend, however large it is
MIN_RECORDS = 3
# the newest records that are kept, at least: what the rules look back on
KEPT_PAIRS, KEPT_RECORDS = 1024, 50
# a metric of every evaluation with sampled answers, and of every one with validation pairs
SAMPLED, VALIDATED = "samples/repetition/policy", "eval/loss"


def pairs_before_comparison(pairs_per_record: int) -> int:
    """The number of pairs after which the first and the newest window are complete and rules compare them."""
    return 2 * pairs_per_record * max(MIN_RECORDS, -(-WINDOW_PAIRS // pairs_per_record))


@dataclass(frozen=True)
class Record:
    """The logged metrics of one or more training steps: the last of them, and the number of their pairs."""

    step: int
    pairs: int
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class Window:
    """Consecutive records, oldest first."""

    records: Sequence[Record]

    def is_full(self, pairs: int = WINDOW_PAIRS) -> bool:
        return len(self.records) >= MIN_RECORDS and self.num_pairs >= pairs

    @property
    def num_pairs(self) -> int:
        return sum(record.pairs for record in self.records)

    def mean(self, name: str) -> float | None:
        """Mean of a metric over the pairs; None if no record has it."""
        present = [record for record in self.records if name in record.metrics]
        pairs = sum(record.pairs for record in present)
        return sum(record.metrics[name] * record.pairs for record in present) / pairs if pairs else None


@dataclass(frozen=True)
class Validation:
    """The newest evaluation on validation pairs with a finite loss, and the first and the lowest loss so far."""

    metrics: Mapping[str, float]
    training: Window  # the newest training records at that time; fewer than a full window at the start of a run
    first_loss: float
    lowest_loss: float
    lowest_step: int


@dataclass
class History:
    """A run as the rules see it: facts that are not in its metrics, its first window and its newest records.

    All but the facts is a function of the records alone, so a replay restores it.
    """

    total_steps: int
    num_training_pairs: int
    duplicates: int = 0  # training pairs that repeat another one
    initial_loss: float | None = None  # while policy equals reference; None if that is not a constant
    starts_at_reference: bool = False  # policy and reference start from the same weights
    logp_noise: float = 0.0  # nats per token by which their logps may differ nonetheless
    compares_sides: bool = True  # the objective compares chosen with rejected
    num_validation_pairs: int = 0
    refused: frozenset[str] = frozenset()  # settings that rules advise and the losses of the run refuse

    def __post_init__(self) -> None:
        self._first: list[Record] = []
        self._newest: deque[Record] = deque()
        self._newest_pairs = self._pairs_seen = 0
        self.sampled: Mapping[str, float] = {}  # the newest evaluation with sampled answers
        self.validation: Validation | None = None

    def add(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Add a record; return False if it has nothing that a rule compares, or if all its steps were skipped."""
        is_training = "loss" in metrics and "pairs_seen" in metrics
        if is_training:
            self._add_training(step, metrics)
        if SAMPLED in metrics:
            self.sampled = metrics
        if VALIDATED in metrics:
            self._add_validation(step, metrics)
        return is_training or SAMPLED in metrics or VALIDATED in metrics

    def _add_training(self, step: int, metrics: Mapping[str, float]) -> None:
        seen = int(metrics["pairs_seen"])
        record = Record(step, seen - self._pairs_seen, metrics)
        self._pairs_seen = seen
        if not self.first.is_full():
            self._first.append(record)
        self._newest.append(record)
        self._newest_pairs += record.pairs
        while len(self._newest) > KEPT_RECORDS and self._newest_pairs - self._newest[0].pairs >= KEPT_PAIRS:
            self._newest_pairs -= self._newest.popleft().pairs

    def _add_validation(self, step: int, metrics: Mapping[str, float]) -> None:
        loss, before = metrics[VALIDATED], self.validation
        if not math.isfinite(loss):
            return
        first, lowest, lowest_step = loss, loss, step
        if before is not None:
            first = before.first_loss
            if loss >= before.lowest_loss:
                lowest, lowest_step = before.lowest_loss, before.lowest_step
        self.validation = Validation(metrics, self._newest_window(), first, lowest, lowest_step)

    def _newest_window(self, pairs: int = WINDOW_PAIRS) -> Window:
        """The newest records with at least `pairs` pairs, or all there are."""
        found: list[Record] = []
        num_pairs = 0
        for record in reversed(self._newest):
            if len(found) >= MIN_RECORDS and num_pairs >= pairs:
                break
            found.append(record)
            num_pairs += record.pairs
        return Window(found[::-1])

    @property
    def first(self) -> Window:
        return Window(self._first)

    def recent(self, pairs: int = WINDOW_PAIRS) -> Window | None:
        """The newest records with at least `pairs` pairs, none of them in the first window; None if there are fewer."""
        window = self._newest_window(pairs)
        is_complete = self.first.is_full() and window.is_full(pairs)
        return window if is_complete and window.records[0].step > self._first[-1].step else None

    def newest(self, name: str, count: int) -> list[float]:
        """A metric in the newest `count` records, oldest first; empty if there are fewer records with it."""
        values = [record.metrics[name] for record in list(self._newest)[-count:] if name in record.metrics]
        return values if len(values) == count else []
