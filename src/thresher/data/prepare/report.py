"""Preparation report: counts that account for every row, lengths and findings; `cli/` and `report/` show it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import Any

from thresher.data.example import UNITS, Kind
from thresher.data.prepare.findings import Finding, LengthBias
from thresher.data.store.reader import ExampleStore
from thresher.errors import UserError

PERCENTILES = (0, 50, 90, 99, 100)
MAX_SHARE_TOO_LONG = 0.05  # more than this share of dropped pairs causes a warning
# by truncation: why a pair is dropped, the truncations that keep it, and what they truncate
_TOO_LONG = {
    "drop": ("are", ("prompt_start", "response_end"), "pairs"),
    "prompt_start": ("have responses that alone are", ("response_end",), "the responses"),
    "response_end": ("have a prompt that alone is", ("prompt_start",), "the prompts"),
}
# file, "line" or "row", and number
RowPlace = tuple[str, str, int]
# absent from the reports of pairs, as in stores that are older than other kinds
_OF_OTHER_KINDS = ("kind", "num_responses", "identical_responses", "desirable")


@dataclass(frozen=True)
class FileReport:
    """One source file."""

    name: str
    digest: str
    shape: str  # name of its row format
    rows: int
    unused_columns: tuple[str, ...] = ()


@dataclass(frozen=True)
class PrepareReport:
    """Counts of a preparation; rows_read = pairs_kept + rows_joined + bad_rows + the sum of dropped."""

    files: tuple[FileReport, ...]
    rows_read: int
    pairs_kept: int
    rows_joined: int = 0  # labelled rows that became the second response of a pair
    bad_rows: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)
    truncated: Mapping[str, int] = field(default_factory=dict)
    splits_moved: int = 0
    headers_shortened: int = 0
    # tokens of prompt, chosen, rejected and total (prompt + longer side) at `PERCENTILES`
    percentiles: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    length_bias: LengthBias | None = None
    bad_reasons: Mapping[str, int] = field(default_factory=dict)
    length_to_keep_95: int | None = None  # the sequence_length that keeps 95 % of the pairs; None if none is too long
    bad_examples: Mapping[str, tuple[RowPlace, ...]] = field(default_factory=dict)  # the first of each bad reason
    kind: Kind = "pairs"
    num_responses: int = 0  # kept; not counted for pairs
    identical_responses: int = 0  # dropped from lists that were kept
    desirable: int = 0  # of examples with a label

    def __post_init__(self) -> None:
        accounted = self.pairs_kept + self.rows_joined + self.bad_rows + sum(self.dropped.values())
        if self.rows_read != accounted:
            raise AssertionError(f"{self.rows_read} rows were read, but {accounted} are accounted for")

    def truncation_warning(self, how: str, sequence_length: str, truncation: str) -> str | None:
        """Describe the pairs dropped as too long if they are many, and what the user can set to keep them.

        Args:
            how: the truncation in use.
            sequence_length: an option or a config key, up to and including what precedes the value.
            truncation: the same.
        """
        dropped = self.dropped.get("too_long", 0)
        total = self.pairs_kept + dropped
        if dropped <= MAX_SHARE_TOO_LONG * total:
            return None
        keep = "" if self.length_to_keep_95 is None else f"{sequence_length}{self.length_to_keep_95} keeps 95 %, and "
        are, others, what = _TOO_LONG.get(how, _TOO_LONG["drop"])
        instead = " or ".join(f"{truncation}{other}" for other in others)
        return (
            f"{dropped:,} of {total:,} {self.unit} ({dropped / total:.0%}) {are} too long and were dropped; "
            f"{keep}{instead} truncates {what} instead"
        )

    @property
    def unit(self) -> str:
        """What the examples are called."""
        return UNITS[self.kind]

    def count_rows(self) -> Iterator[tuple[str, int]]:
        """Yield how the rows were handled, in words, with counts."""
        yield "rows read", self.rows_read
        yield f"{self.unit} kept", self.pairs_kept
        if self.kind == "lists":
            yield "responses kept", self.num_responses
            if self.identical_responses:
                yield "identical responses dropped", self.identical_responses
        if self.rows_joined:
            yield "rows joined to another row's pair", self.rows_joined
        for cause, count in self.dropped.items():
            yield f"dropped: {cause.replace('_', ' ')}", count
        if self.bad_rows:
            yield "bad rows", self.bad_rows
        for kind, count in self.truncated.items():
            yield f"truncated: {kind.replace('_', ' ')}", count
        if self.splits_moved:
            yield "prompt/response boundaries moved before a merged token", self.splits_moved
        if self.headers_shortened:
            yield "responses without the full generation prompt", self.headers_shortened

    def notes(self) -> Iterator[tuple[int, str]]:
        """Yield remarks on files, bad rows, findings and lengths, with their logging level."""
        for file in self.files:
            unused = f"; ignored columns: {', '.join(file.unused_columns)}" if file.unused_columns else ""
            yield logging.INFO, f"{file.name}: {file.rows:,} rows of format {file.shape}{unused}"
        for reason, count in self.bad_reasons.items():
            places = format_places(self.bad_examples.get(reason, ()))
            yield logging.WARNING, f"{count:,} bad row{'s' if count != 1 else ''}: {reason}{places and f' ({places})'}"
        for finding in self.findings:
            such_as = format_examples(finding.examples, self.unit)
            line = f"{finding.name.replace('_', ' ')}: {finding.count:,} {self.unit}{such_as}"
            yield logging.WARNING if finding.count else logging.INFO, line
        if self.length_bias is not None:
            bias = self.length_bias
            yield (
                logging.INFO,
                f"length: chosen is longer in {bias.share_chosen_longer:.0%} of pairs, equal in "
                f"{bias.share_equal:.0%}; mean {bias.mean_chosen:.1f} tokens chosen, {bias.mean_rejected:.1f} rejected",
            )

        if self.kind == "labels" and self.pairs_kept:
            yield logging.INFO, self._describe_labels()

    def _describe_labels(self) -> str:
        undesirable = self.pairs_kept - self.desirable
        line = f"labels: {self.desirable:,} of {self.pairs_kept:,} desirable ({self.desirable / self.pairs_kept:.0%})"
        if not self.desirable or not undesirable:
            return line
        # Eq. 8 of arXiv 2402.01306: desirable_weight * desirable / (undesirable_weight * undesirable) in [1, 4/3]
        equal = undesirable / self.desirable
        return f"{line}; for kto, desirable_weight {equal:.3g} balances both counts; advised: up to {4 / 3 * equal:.3g}"

    def to_json(self) -> dict[str, Any]:
        values = asdict(self)
        for name in _OF_OTHER_KINDS if self.kind == "pairs" else ():
            del values[name]
        if not self.bad_examples:
            del values["bad_examples"]
        return values

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> PrepareReport:
        """Build a report from the return value of `to_json`."""
        bias = None if values["length_bias"] is None else LengthBias(**values["length_bias"])
        files = (FileReport(**{**each, "unused_columns": tuple(each["unused_columns"])}) for each in values["files"])
        findings = (Finding(each["name"], each["count"], tuple(each["examples"])) for each in values["findings"])
        percentiles = {name: tuple(each) for name, each in values["percentiles"].items()}
        examples = {
            reason: tuple((str(file), str(unit), int(number)) for file, unit, number in places)
            for reason, places in values.get("bad_examples", {}).items()
        }
        parsed: dict[str, Any] = {
            "files": tuple(files),
            "findings": tuple(findings),
            "percentiles": percentiles,
            "length_bias": bias,
            "bad_examples": examples,
        }
        return cls(**{**values, **parsed})


def percentile_names() -> list[str]:
    """The columns of `percentiles`."""
    return ["min" if p == 0 else "max" if p == 100 else f"p{p}" for p in PERCENTILES]


def format_examples(pair_ids: tuple[int, ...], unit: str = "pairs") -> str:
    return f" (such as {unit.removesuffix('s')} {', '.join(map(str, pair_ids))})" if pair_ids else ""


def format_places(places: Iterable[RowPlace]) -> str:
    """Name rows by file and number: `a.jsonl, line 3, 7; b.jsonl, line 1`."""
    groups = groupby(places, key=lambda place: place[:2])
    return "; ".join(f"{file}, {unit} {', '.join(str(row[2]) for row in rows)}" for (file, unit), rows in groups)


def other_truncation(how: str) -> str:
    """Return a truncation that may keep pairs which this one drops."""
    return _TOO_LONG[how][1][0]


def truncation_of(store: ExampleStore) -> str:
    """Return the truncation that a store was prepared with, `drop` if its manifest does not say."""
    try:
        return str(store.manifest["settings"]["truncation"])
    except (KeyError, TypeError):
        return "drop"


def report_of(store: ExampleStore) -> PrepareReport:
    """Read the preparation report from a store's manifest."""
    try:
        return PrepareReport.from_json(store.manifest["report"])
    except (KeyError, TypeError, ValueError, AttributeError, AssertionError) as error:
        raise UserError(f"the report of the store {store.path} is damaged ({error}); prepare it again") from error
