"""Running preparation statistics, summed over blocks in file order, in bounded memory.

Keys that must be compared over all pairs are in files (`SpilledKeys`); everything else is a count. The state can be
saved, so an interrupted preparation resumes with the same numbers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from thresher.data.prepare.blocks import BadRow, BlockResult, TaskReader
from thresher.data.prepare.findings import Finding, LengthBias, SpilledKeys
from thresher.data.prepare.report import PERCENTILES, FileReport, PrepareReport, RowPlace
from thresher.data.store.arrow_schema import lengths_of
from thresher.data.store.reader import LENGTH_DTYPE, Lengths

_COLUMNS = ("prompt", "chosen", "rejected", "total")


class LengthHistogram:
    """Number of pairs per length in tokens, for exact percentiles and length bias.

    Memory grows with the longest pair, not with the number of pairs.
    """

    def __init__(self, state: Mapping[str, Any] | None = None) -> None:
        counts: Mapping[str, Mapping[str, int]] = state["counts"] if state else {}
        self._counts = {
            name: Counter({int(length): count for length, count in counts.get(name, {}).items()}) for name in _COLUMNS
        }
        self._num_chosen_longer = int(state["num_chosen_longer"]) if state else 0
        self._num_equal = int(state["num_equal"]) if state else 0

    def add(self, lengths: Lengths) -> None:
        """Count pairs; `lengths` is [pairs, (prompt, chosen, rejected)]."""
        prompt, chosen, rejected = lengths.T
        for name, column in zip(_COLUMNS, (prompt, chosen, rejected, prompt + lengths[:, 1:].max(axis=1)), strict=True):
            values, counts = np.unique(column, return_counts=True)
            self._counts[name].update(dict(zip(values.tolist(), counts.tolist(), strict=True)))
        self._num_chosen_longer += int(np.count_nonzero(chosen > rejected))
        self._num_equal += int(np.count_nonzero(chosen == rejected))

    def state(self) -> dict[str, Any]:
        """Return the state to resume from, as JSON values."""
        return {
            "counts": {name: dict(counts) for name, counts in self._counts.items()},
            "num_chosen_longer": self._num_chosen_longer,
            "num_equal": self._num_equal,
        }

    def percentiles(self) -> dict[str, tuple[int, ...]]:
        """Return token counts at `PERCENTILES`, each the length of an actual pair (not interpolated)."""
        return {
            # rounded down as in numpy.percentile(method="lower")
            name: tuple(_length_at(counts, int((counts.total() - 1) * (each / 100))) for each in PERCENTILES)
            for name, counts in self._counts.items()
        }

    def length_to_keep(self, share: float, dropped: Counter[int]) -> int:
        """Return the smallest length that this share of all pairs does not exceed, including dropped ones."""
        counts = self._counts["total"] + dropped
        return _length_at(counts, math.ceil(share * counts.total()) - 1)

    def bias(self) -> LengthBias:
        """Compare the lengths of chosen and rejected responses."""
        num_pairs = self._counts["total"].total()
        chosen, rejected = (
            sum(length * count for length, count in self._counts[side].items()) / num_pairs
            for side in ("chosen", "rejected")
        )
        return LengthBias(self._num_chosen_longer / num_pairs, self._num_equal / num_pairs, chosen, rejected)


def _length_at(counts: Counter[int], index: int) -> int:
    """Return the length of one pair, by its index among all pairs in order of length."""
    lengths = sorted(counts)
    ends = np.cumsum([counts[length] for length in lengths])
    return lengths[int(np.searchsorted(ends, index, side="right"))]


# reasons may quote a row, so their number is otherwise unbounded
MAX_REASONS = 4096
OTHER_REASONS = "other reasons"
MAX_BAD_EXAMPLES = 3  # per reason
_COUNTS = ("rows_read", "pairs_kept", "rows_joined", "splits_moved", "headers_shortened")


class PrepareStats:
    """Sums of block results, and their position in the sources; `state` is what `sync` returned before a restart."""

    def __init__(self, reader: TaskReader, directory: Path, state: Mapping[str, Any] | None = None) -> None:
        self._reader = reader
        saved: Mapping[str, Any] = state or {}
        self._counts = Counter({name: int(saved.get(name, 0)) for name in _COUNTS})
        self._bad_reasons: Counter[str] = Counter(saved.get("bad_reasons", {}))
        self._dropped: Counter[str] = Counter(saved.get("dropped", {}))
        self._truncated: Counter[str] = Counter(saved.get("truncated", {}))
        # pairs per length, as in LengthHistogram; JSON has no integer keys
        self._too_long: Counter[int] = Counter({int(k): count for k, count in saved.get("too_long", {}).items()})
        # in the order of the first bad row of each reason
        self._bad_examples: dict[str, list[RowPlace]] = {
            reason: [(file, unit, number) for file, unit, number in places]
            for reason, places in saved.get("bad_examples", {}).items()
        }
        self._findings = {
            name: Finding(name, count, tuple(examples)) for name, (count, examples) in saved.get("findings", {}).items()
        }
        self._rows_of_file: list[int] = list(saved.get("rows_of_file", [0] * len(reader.files)))
        self._lengths = LengthHistogram(saved.get("lengths"))
        # position: current span, its blocks added so far, and the last row number before the span and within it
        self.span = int(saved.get("span", 0))
        self.blocks_of_span = int(saved.get("blocks_of_span", 0))
        self._number_before_span = int(saved.get("number_before_span", 0))
        self._last_number = int(saved.get("last_number", 0))
        self._keys = SpilledKeys(directory, self.pairs_kept)

    @property
    def rows_read(self) -> int:
        return self._counts["rows_read"]

    @property
    def pairs_kept(self) -> int:
        return self._counts["pairs_kept"]

    @property
    def num_bad_rows(self) -> int:
        return self._bad_reasons.total()

    def first_bad_row(self) -> tuple[RowPlace, str]:
        """Return the place of the first bad row, and the reason."""
        reason, places = next(iter(self._bad_examples.items()))
        return places[0], reason

    def add(self, result: BlockResult) -> list[BadRow]:
        """Add a block; return its bad rows in order, numbered from the start of their file."""
        self._advance_to(result)
        bad = [replace(row, number=self._number_before_span + row.number) for row in result.bad]
        bad.sort(key=lambda row: row.number)
        for row in bad:
            known = row.reason in self._bad_reasons or len(self._bad_reasons) < MAX_REASONS
            reason = row.reason if known else OTHER_REASONS
            self._bad_reasons[reason] += 1
            if len(places := self._bad_examples.setdefault(reason, [])) < MAX_BAD_EXAMPLES:
                places.append((row.file, row.unit, row.number))
        self._dropped.update(result.dropped)
        self._truncated.update(result.truncated)
        self._too_long.update(result.too_long)
        self._lengths.add(lengths_of(result.pairs).astype(LENGTH_DTYPE))
        self._keys.append(result.keys, result.swapped_keys)
        for name, positions in result.findings.items():
            numbers = np.asarray(positions) + self.pairs_kept
            self._findings[name] = self._findings.get(name, Finding(name)).with_more(numbers)
        self._rows_of_file[self._reader.spans[result.span].file] += result.rows_read
        self._counts.update(
            rows_read=result.rows_read,
            pairs_kept=result.pairs.num_rows,
            rows_joined=result.rows_joined,
            splits_moved=result.splits_moved,
            headers_shortened=result.headers_shortened,
        )
        return bad

    def _advance_to(self, result: BlockResult) -> None:
        spans = self._reader.spans
        if result.span != self.span:
            is_new_file = spans[result.span].file != spans[self.span].file
            self._number_before_span = 0 if is_new_file else self._number_before_span + self._last_number
            self.span, self.blocks_of_span = result.span, 0
        self.blocks_of_span += 1
        self._last_number = result.last_number

    def sync(self) -> dict[str, Any]:
        """Flush the keys to the disk; return the state to resume from."""
        self._keys.sync()
        return {
            **self._counts,
            "bad_reasons": dict(self._bad_reasons),
            "dropped": dict(self._dropped),
            "truncated": dict(self._truncated),
            "too_long": dict(self._too_long),
            "bad_examples": self._bad_examples,
            "findings": {name: [each.count, each.examples] for name, each in self._findings.items()},
            "rows_of_file": self._rows_of_file,
            "lengths": self._lengths.state(),
            "span": self.span,
            "blocks_of_span": self.blocks_of_span,
            "number_before_span": self._number_before_span,
            "last_number": self._last_number,
        }

    def close(self) -> None:
        self._keys.close()

    def report(self, digests: Sequence[str]) -> PrepareReport:
        """Build the report after the last block, with one digest per source."""
        dropped = Counter(self._dropped)
        if self._reader.num_unpaired:
            dropped["unpaired"] += self._reader.num_unpaired
        has_pairs = self.pairs_kept > 0
        findings = (*self._keys.find_repeats(), *self._findings.values()) if has_pairs else ()
        bad_reasons = dict(self._bad_reasons.most_common(20))
        return PrepareReport(
            files=tuple(
                FileReport(each.source.shown, digest, each.format_name or "unreadable", rows, each.unused_columns)
                for each, digest, rows in zip(self._reader.files, digests, self._rows_of_file, strict=True)
            ),
            rows_read=self.rows_read,
            pairs_kept=self.pairs_kept,
            rows_joined=self._counts["rows_joined"],
            bad_rows=self.num_bad_rows,
            dropped=dict(sorted(dropped.items())),
            truncated=dict(sorted(self._truncated.items())),
            splits_moved=self._counts["splits_moved"],
            headers_shortened=self._counts["headers_shortened"],
            percentiles=self._lengths.percentiles() if has_pairs else {},
            findings=tuple(each for each in findings if each.count),
            length_bias=self._lengths.bias() if has_pairs else None,
            bad_reasons=bad_reasons,
            length_to_keep_95=self._lengths.length_to_keep(0.95, self._too_long) if self._too_long else None,
            bad_examples={reason: tuple(self._bad_examples[reason]) for reason in bad_reasons},
        )
