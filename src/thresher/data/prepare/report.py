"""What became of every row: counts that add up, lengths, and findings. Printing them is left to `cli/`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from thresher.data.prepare.findings import Finding, LengthBias
from thresher.data.store.reader import PairStore
from thresher.errors import UserError

PERCENTILES = (0, 50, 90, 99, 100)


@dataclass(frozen=True)
class FileReport:
    """What one source file is: its rows' shape, how many there are, and the columns that were not read."""

    name: str
    digest: str
    shape: str
    rows: int
    unused_columns: tuple[str, ...] = ()


@dataclass(frozen=True)
class PrepareReport:
    """The account of a preparation: rows_read = pairs_kept + rows_joined + bad_rows + all that was dropped.

    rows_joined: rows with a label that became the other half of a pair.
    percentiles: tokens of prompt, chosen, rejected and total (prompt + longer side) at `PERCENTILES`.
    """

    files: tuple[FileReport, ...]
    rows_read: int
    pairs_kept: int
    rows_joined: int = 0
    bad_rows: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)
    truncated: Mapping[str, int] = field(default_factory=dict)
    splits_moved: int = 0
    headers_shortened: int = 0
    percentiles: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    length_bias: LengthBias | None = None
    bad_reasons: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        accounted = self.pairs_kept + self.rows_joined + self.bad_rows + sum(self.dropped.values())
        if self.rows_read != accounted:
            raise AssertionError(f"{self.rows_read} rows were read, but {accounted} are accounted for")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> PrepareReport:
        """Read back what `to_json` wrote."""
        bias = values["length_bias"]
        fields = {
            **values,
            "files": tuple(
                FileReport(**{**file, "unused_columns": tuple(file["unused_columns"])}) for file in values["files"]
            ),
            "findings": tuple(
                Finding(each["name"], each["count"], tuple(each["examples"])) for each in values["findings"]
            ),
            "length_bias": None if bias is None else LengthBias(**bias),
            "percentiles": {name: tuple(each) for name, each in values["percentiles"].items()},
        }
        return cls(**fields)


def report_of(store: PairStore) -> PrepareReport:
    """Read what became of the rows that a store was made from."""
    try:
        return PrepareReport.from_json(store.manifest["report"])
    except (KeyError, TypeError, ValueError, AttributeError, AssertionError) as error:
        raise UserError(f"the report of the store {store.path} is damaged ({error}); prepare it again") from error
