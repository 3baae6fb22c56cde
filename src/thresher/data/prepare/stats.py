"""Running statistics of a preparation, summed over blocks in file order, in bounded memory.

Keys that must be compared over all pairs are in files (`duplicates`); everything else is a count. The state can be
saved, so that an interrupted preparation resumes with the same numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from thresher.data.prepare.block_worker import BadRow, BlockResult
from thresher.data.prepare.duplicates import SpilledKeys
from thresher.data.prepare.findings import NUM_EXAMPLES, Finding
from thresher.data.prepare.length_histogram import LengthHistogram
from thresher.data.prepare.report import FileReport, PrepareReport
from thresher.data.prepare.tasks import TaskReader
from thresher.data.store.arrow_schema import lengths_of
from thresher.data.store.reader import LENGTH_DTYPE

# reasons may quote a row, so their number is otherwise unbounded
MAX_REASONS = 4096
OTHER_REASONS = "other reasons"
_COUNTS = ("rows_read", "pairs_kept", "rows_joined", "splits_moved", "headers_shortened", "num_control_tokens")


class PrepareStats:
    """Sums of block results, and their position in the sources.

    directory: for the files of keys. state: return value of `sync` in the process to resume.
    """

    def __init__(self, reader: TaskReader, directory: Path, state: Mapping[str, Any] | None = None) -> None:
        self._reader = reader
        saved: Mapping[str, Any] = state or {}
        self._counts = Counter({name: int(saved.get(name, 0)) for name in _COUNTS})
        self._bad_reasons: Counter[str] = Counter(saved.get("bad_reasons", {}))
        self._dropped: Counter[str] = Counter(saved.get("dropped", {}))
        self._truncated: Counter[str] = Counter(saved.get("truncated", {}))
        # pairs per length, as in LengthHistogram; JSON has no integer keys
        self._too_long: Counter[int] = Counter({int(k): count for k, count in saved.get("too_long", {}).items()})
        self._control_tokens: list[int] = list(saved.get("control_tokens", ()))
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

    def add(self, result: BlockResult) -> list[BadRow]:
        """Add a block; return its bad rows in order, numbered from the start of their file."""
        self._advance_to(result)
        bad = [replace(row, number=self._number_before_span + row.number) for row in result.bad]
        for row in bad:
            known = row.reason in self._bad_reasons or len(self._bad_reasons) < MAX_REASONS
            self._bad_reasons[row.reason if known else OTHER_REASONS] += 1
        self._dropped.update(result.dropped)
        self._truncated.update(result.truncated)
        self._too_long.update(result.too_long)
        self._lengths.add(lengths_of(result.pairs).astype(LENGTH_DTYPE))
        self._keys.append(result.keys, result.swapped_keys)
        if len(self._control_tokens) < NUM_EXAMPLES:
            numbers = [self.pairs_kept + position for position in result.control_tokens]
            self._control_tokens = [*self._control_tokens, *numbers][:NUM_EXAMPLES]
        self._rows_of_file[self._reader.spans[result.span].file] += result.rows_read
        self._counts.update(
            rows_read=result.rows_read,
            pairs_kept=result.pairs.num_rows,
            rows_joined=result.rows_joined,
            splits_moved=result.splits_moved,
            headers_shortened=result.headers_shortened,
            num_control_tokens=len(result.control_tokens),
        )
        return sorted(bad, key=lambda row: row.number)

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
            "control_tokens": self._control_tokens,
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
        """Build the report after the last block; digests: one per source."""
        dropped = Counter(self._dropped)
        if self._reader.num_unpaired:
            dropped["unpaired"] += self._reader.num_unpaired
        has_pairs = self.pairs_kept > 0
        control = Finding("control_tokens_in_text", self._counts["num_control_tokens"], tuple(self._control_tokens))
        findings = (*self._keys.find_repeats(), control) if has_pairs else ()
        return PrepareReport(
            files=tuple(
                FileReport(each.source.shown, digest, each.format_name or "unreadable", rows, each.unused_columns)
                for each, digest, rows in zip(self._reader.files, digests, self._rows_of_file, strict=True)
            ),
            rows_read=self.rows_read,
            pairs_kept=self.pairs_kept,
            rows_joined=self._counts["rows_joined"],
            bad_rows=self._bad_reasons.total(),
            dropped=dict(sorted(dropped.items())),
            truncated=dict(sorted(self._truncated.items())),
            splits_moved=self._counts["splits_moved"],
            headers_shortened=self._counts["headers_shortened"],
            percentiles=self._lengths.percentiles() if has_pairs else {},
            findings=tuple(each for each in findings if each.count),
            length_bias=self._lengths.bias() if has_pairs else None,
            bad_reasons=dict(self._bad_reasons.most_common(20)),
            length_to_keep_95=self._lengths.length_to_keep(0.95, self._too_long) if self._too_long else None,
        )
