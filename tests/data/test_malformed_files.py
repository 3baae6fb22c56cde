"""Files with a wrong suffix, truncated, oversized or made to break a reader.

Each case is a real file that `prepare` reads, with one of three outcomes: all rows are loaded; some rows are bad, with
file and number, and the others are kept; or a `UserError` that names the file. Never a traceback, a hang (every case
has a time limit) or a row that is not counted.

| cases | in this file | in other files |
|---|---|---|
| encodings: BOM, UTF-16, Latin-1, NUL, surrogates, line ends | 14 | 1 (test_prepare) |
| JSON: truncated, nested, repeated keys, numbers, wrong top level | 16 | 4 (test_source_files, test_prepare) |
| CSV | 9 | 1 (test_source_files) |
| compressed: truncated, wrong suffix, bombs | 8 | 1 (test_source_files) |
| Parquet, Arrow, saved datasets | 15 | 2 (test_source_files) |
| paths: directories, symlinks, pipes, names | 9 | 5 (test_source_files) |
| row values: roles, tools, margins, turns | 29 | 12 (test_row_formats) |
"""

from __future__ import annotations

import bz2
import datetime
import gzip
import json
import os
import signal
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from thresher.data.prepare.prepare import DataSettings, prepare
from thresher.data.rows.parsing import MAX_ROW_BYTES
from thresher.data.sources import readers
from thresher.data.sources.resolve import resolve_sources, source_digest
from thresher.errors import UserError

SECONDS = 120
GOOD = {"prompt": "Why?", "chosen": "yes", "rejected": "no"}
OTHER = {"prompt": "And?", "chosen": "good", "rejected": "bad"}


@dataclass(frozen=True)
class Loads:
    """Every row is kept, or dropped for a counted reason."""

    kept: int
    dropped: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class BadRows:
    """The number of rows kept, the numbers of the bad rows, and the reason of the first."""

    kept: int
    numbers: tuple[int, ...]
    reason: str


@dataclass(frozen=True)
class Rejected:
    """The file is rejected with a message that contains its name and this text."""

    message: str


Content = bytes | Callable[[Path], object]
Outcome = Loads | BadRows | Rejected


def line(row: Any, **how: Any) -> bytes:
    return json.dumps(row, **how).encode() + b"\n"


def lines(*rows: Any) -> bytes:
    return b"".join(row if isinstance(row, bytes) else line(row) for row in rows)


def between_good(row: Any) -> bytes:
    """A bad row between two good ones, which must be kept."""
    return lines(GOOD, row if isinstance(row, bytes) else line(row), OTHER)


def with_value(**values: Any) -> bytes:
    return between_good({**GOOD, **values})


def turn(role: Any, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def bad(reason: str, number: int = 2) -> BadRows:
    return BadRows(2, (number,), reason)


def zstd(content: bytes) -> bytes:
    return pa.compress(content, codec="zstd", asbytes=True)


def parquet(*columns: Any, schema: Any = None) -> Callable[[Path], object]:
    return lambda path: pq.write_table(pa.Table.from_pylist(list(columns), schema=schema), path)


def arrow_stream(path: Path) -> None:
    table = pa.Table.from_pylist([GOOD] * 1000)
    with pa.ipc.new_stream(path, table.schema) as sink:
        sink.write_table(table, max_chunksize=100)


def with_repeated_column(path: Path) -> None:
    table = pa.table([["Why?"], ["yes"], ["no"], ["never"]], names=["prompt", "chosen", "rejected", "chosen"])
    if path.suffix == ".parquet":
        pq.write_table(table, path)
        return
    with pa.ipc.new_file(path, table.schema) as sink:
        sink.write_table(table)


def truncated(write: Callable[[Path], object], keep: float) -> Callable[[Path], object]:
    def truncate(path: Path) -> None:
        write(path)
        content = path.read_bytes()
        path.write_bytes(content[: int(len(content) * keep)])

    return truncate


def flipped(path: Path) -> None:
    parquet(*[{**GOOD, "prompt": f"q{n}" * 50} for n in range(500)])(path)
    content = bytearray(path.read_bytes())
    for at in range(100, 1100, 7):
        content[at] ^= 0xFF
    path.write_bytes(bytes(content))


def saved(**files: str) -> Callable[[Path], object]:
    def write(path: Path) -> None:
        path.mkdir()
        for name, content in files.items():
            (path / f"{name}.json").write_text(content)

    return write


def linked(target: str) -> Callable[[Path], object]:
    def write(path: Path) -> None:
        (path.parent / "real.jsonl").write_bytes(lines(GOOD))
        path.symlink_to(target)

    return write


CSV_HEADER = b"prompt,chosen,rejected\n"
CSV_ROW = b"Why?,yes,no\n"

ENCODINGS: dict[str, tuple[str, Content, Outcome]] = {
    "BOM before JSON lines": ("a.jsonl", b"\xef\xbb\xbf" + lines(GOOD, OTHER), Loads(2)),
    "BOM before JSON": ("a.json", b"\xef\xbb\xbf" + json.dumps([GOOD]).encode(), Loads(1)),
    "BOM before CSV": ("a.csv", b"\xef\xbb\xbf" + CSV_HEADER + CSV_ROW, Loads(1)),
    "BOM between lines of joined files": ("a.jsonl", between_good(b"\xef\xbb\xbf" + line(OTHER)), Loads(3)),
    "UTF-16 JSON lines": ("a.jsonl", lines(GOOD, OTHER).decode().encode("utf-16"), Rejected("looks like UTF-16")),
    "UTF-16 lines without BOM": (
        "a.jsonl",
        lines(GOOD, OTHER).decode().encode("utf-16-le"),
        Rejected("looks like UTF-16"),
    ),
    "UTF-16 JSON": ("a.json", json.dumps([GOOD]).encode("utf-16"), Loads(1)),
    "UTF-16 CSV": ("a.csv", (CSV_HEADER + CSV_ROW).decode().encode("utf-16"), Rejected("is not UTF-8")),
    "Latin-1 in JSON": ("a.json", b'[{"prompt": "caf\xe9"}]', Rejected("not valid JSON")),
    "Latin-1 in one row of CSV": (
        "a.csv",
        CSV_HEADER + CSV_ROW + b"caf\xe9,a,b\n" + CSV_ROW,
        bad("invalid UTF-8 or a lone surrogate"),
    ),
    "NUL bytes in a line": (
        "a.jsonl",
        between_good(b'{"prompt": "\x00"}\n'),
        bad("not JSON: Invalid control character"),
    ),
    "a lone surrogate": (
        "a.jsonl",
        between_good(line({**GOOD, "prompt": "\ud800"})),
        bad("invalid UTF-8 or a lone surrogate"),
    ),
    "a lone surrogate in a key": (
        "a.json",
        json.dumps([GOOD, {**GOOD, "\udfff": 1}, GOOD]).encode(),
        bad("a lone surrogate"),
    ),
    "mixed line ends": ("a.jsonl", line(GOOD)[:-1] + b"\r\n" + line(OTHER) + b"\r\n\n" + line(GOOD)[:-1], Loads(3)),
}
JSON: dict[str, tuple[str, Content, Outcome]] = {
    "last line truncated": ("a.jsonl", lines(GOOD, OTHER) + line(GOOD)[:20], BadRows(2, (3,), "not JSON")),
    "JSON truncated": ("a.json", json.dumps([GOOD, OTHER]).encode()[:-9], Rejected("not valid JSON")),
    "lines separated by carriage returns only": (
        "a.jsonl",
        lines(GOOD, OTHER).replace(b"\n", b"\r"),
        Rejected("Extra data"),
    ),
    "a line nested 100,000 deep": ("a.jsonl", between_good(b"[" * 100_000 + b"\n"), bad("not JSON: nested more than")),
    "a column nested 500 deep": (
        "a.jsonl",
        between_good(b'{"prompt": ' + b"[" * 500 + b"]" * 500 + b"}\n"),
        bad("nested more than 64 levels"),
    ),
    "a row of an array nested 500 deep": (
        "a.json",
        b"[" + line(GOOD) + b"," + b"[" * 500 + b"]" * 500 + b"," + line(OTHER) + b"]",
        bad("nested more than 64 levels"),
    ),
    "an array nested 100,000 deep": ("a.json", b"[" * 100_000, Rejected("nested more than")),
    "objects nested 100,000 deep": ("a.json", b'{"a":' * 100_000, Rejected("nested more than")),
    "a repeated key": (
        "a.jsonl",
        between_good(line(GOOD)[:-2] + b', "chosen": "x"}\n'),
        bad("the key 'chosen' is repeated"),
    ),
    "a repeated key in a message": (
        "a.json",
        b'[{"prompt":"p","chosen":"a","rejected":"b"},'
        b'{"prompt":[{"role":"user","content":"x","content":"y"}],"chosen":"a","rejected":"b"},'
        b'{"prompt":"p","chosen":"a","rejected":"c"}]',
        bad("the key 'content' is repeated"),
    ),
    "an integer of 5,000 digits": ("a.jsonl", between_good(b'{"margin": ' + b"9" * 5000 + b"}\n"), bad("not JSON")),
    "a line of 24 MB": ("a.jsonl", between_good({**GOOD, "unused": "x" * 24_000_000}), Loads(3)),
    "null among rows": ("a.json", json.dumps([GOOD, None, OTHER]).encode(), bad("expected an object")),
    "a string instead of an array": ("a.json", b'"rows"', Rejected("contains a str; expected a list of objects")),
    "an unrelated object": (
        "a.json",
        b'{"error": "rate limit"}',
        Rejected("unrecognized row format with columns error:"),
    ),
    "10,000 columns": (
        "a.jsonl",
        line({f"c{n}": n for n in range(10_000)}),
        Rejected("and 9960 more: no chosen or rejected or prompt column"),
    ),
}
CSV: dict[str, tuple[str, Content, Outcome]] = {
    "an unclosed quote": (
        "a.csv",
        CSV_HEADER + CSV_ROW + b'"Why?,yes,no\n' + CSV_ROW,
        Rejected("line 4: not valid CSV: "),
    ),
    "a quote within a quoted field": ("a.csv", CSV_HEADER + b'"a"b",yes,no\n', Rejected("line 2: not valid CSV: ")),
    "a line with too many fields": ("a.csv", CSV_HEADER + CSV_ROW + b"a,b,c,d\n" + CSV_ROW, bad("more fields than")),
    "a truncated line": ("a.csv", CSV_HEADER + CSV_ROW * 2 + b"Why?,y", BadRows(2, (3,), "no value for rejected")),
    "a repeated column": ("a.csv", b"prompt,chosen,rejected,chosen\n", Rejected("repeated columns: chosen")),
    "no header": ("a.csv", CSV_ROW, Rejected("has no rows")),
    "semicolons": ("a.csv", b"prompt;chosen;rejected\na;b;c\n", Rejected("unrecognized row format with columns")),
    "NUL in a field": ("a.csv", CSV_HEADER + b"Wh\x00y,yes,no\n", Loads(1)),
    "carriage returns only": ("a.csv", (CSV_HEADER + CSV_ROW).replace(b"\n", b"\r"), Loads(1)),
}
COMPRESSED: dict[str, tuple[str, Content, Outcome]] = {
    "truncated bz2": (
        "a.jsonl.bz2",
        bz2.compress(lines(GOOD, OTHER))[:-10],
        Rejected("check that the file is complete"),
    ),
    "truncated zstd": ("a.jsonl.zst", zstd(lines(GOOD, OTHER) * 50)[:-4], Rejected("check that the file is complete")),
    "truncated JSON within gzip": ("a.json.gz", gzip.compress(b'[{"prompt": '), Rejected("not valid JSON")),
    "gzip followed by other bytes": (
        "a.jsonl.gz",
        gzip.compress(lines(GOOD)) + b"not gzip",
        Rejected("check that the file is complete"),
    ),
    "lines named .gz": ("a.jsonl.gz", lines(GOOD, OTHER), Rejected("check that the file is complete")),
    "gzip named .jsonl": ("a.jsonl", gzip.compress(lines(GOOD)), Rejected("looks compressed or binary")),
    "gzip of an empty file": ("a.jsonl.gz", gzip.compress(b""), Rejected("has no rows")),
    "a compressed line of 100 MB": (
        "a.jsonl.gz",
        lambda path: path.write_bytes(gzip.compress(between_good(b"0" * 100_000_000 + b"\n"), 1)),
        bad(f"a line of more than {MAX_ROW_BYTES >> 20} MiB"),
    ),
}
TABLES: dict[str, tuple[str, Content, Outcome]] = {
    "Parquet named .jsonl": ("a.jsonl", parquet(GOOD), Rejected("looks compressed or binary")),
    "lines named .parquet": ("a.parquet", lines(GOOD, OTHER), Rejected("cannot be read as parquet")),
    "lines named .arrow": ("a.arrow", lines(GOOD, OTHER), Rejected("cannot be read as arrow")),
    "Parquet within gzip": ("a.parquet.gz", gzip.compress(b"PAR1"), Rejected("cannot be read as parquet (gzip)")),
    "Parquet with flipped bytes": ("a.parquet", flipped, Rejected("cannot be read as parquet")),
    "Parquet with other columns": (
        "a.parquet",
        parquet({"a": 1}),
        Rejected("row 1: unrecognized row format with columns a:"),
    ),
    "Parquet of bytes": ("a.parquet", parquet({**GOOD, "chosen": b"yes"}), Rejected("got bytes")),
    "Parquet without rows": ("a.parquet", parquet(schema=pa.schema([("prompt", pa.string())])), Rejected("no rows")),
    "null in a required column": ("a.parquet", parquet(GOOD, {**GOOD, "chosen": None}, OTHER), bad("no value for")),
    "a date beyond the range of Python": (
        "a.parquet",
        lambda path: pq.write_table(
            pa.table({**{k: [v] for k, v in GOOD.items()}, "at": pa.array([2**60], pa.timestamp("us"))}), path
        ),
        Rejected("cannot be read as parquet"),
    ),
    "dates and bytes in unused columns": (
        "a.parquet",
        parquet({**GOOD, "at": datetime.date(2020, 1, 1), "raw": b"\xff"}),
        Loads(1),
    ),
    "a repeated column of Parquet": ("a.parquet", with_repeated_column, Rejected("repeated columns: chosen")),
    "a repeated column of Arrow": ("a.arrow", with_repeated_column, Rejected("repeated columns: chosen")),
    "a truncated Arrow stream": ("a.arrow", truncated(arrow_stream, 0.5), Rejected("cannot be read as arrow")),
    "a saved dataset without data": ("a", saved(state="{}", dataset_info="{}"), Rejected("saved_dataset")),
}
PATHS: dict[str, tuple[str, Content, Outcome]] = {
    "a directory with the name of a file": ("a.jsonl", lambda path: path.mkdir(), Rejected("is a directory")),
    "a pipe": ("a.jsonl", lambda path: os.mkfifo(path), Rejected("is a pipe, a socket or a device")),
    "a symlink to a file": ("a.jsonl", linked("real.jsonl"), Loads(1)),
    "a broken symlink": (
        "a.jsonl",
        linked("gone.jsonl"),
        Rejected("is a broken symlink to 'gone.jsonl'"),
    ),
    "a symlink to itself": ("a.jsonl", linked("a.jsonl"), Rejected("is a broken symlink to 'a.jsonl'")),
    "a symlink to a device": ("a.jsonl", linked("/dev/zero"), Rejected("is a pipe, a socket or a device")),
    "a name with brackets": ("a[1].jsonl", lines(GOOD), Loads(1)),
    "no suffix": ("rows", lines(GOOD), Rejected("unknown suffix (none)")),
    "suffixes of two formats": ("a.csv.jsonl", CSV_HEADER + CSV_ROW, Rejected("not JSON")),
}
DEEP_TOOLS = "[" * 300 + "]" * 300
VALUES: dict[str, tuple[str, Content, Outcome]] = {
    "a number instead of text": ("a.jsonl", with_value(prompt=5), bad("`prompt` must be text or messages, got int")),
    "a boolean instead of text": (
        "a.jsonl",
        with_value(chosen=True),
        bad("`chosen` must be text or messages, got bool"),
    ),
    "lists instead of messages": (
        "a.jsonl",
        with_value(prompt=[["user", "x"]]),
        bad("must be a list of messages, got list"),
    ),
    "an object instead of messages": ("a.jsonl", with_value(prompt={}), bad("a message of `prompt` has no role")),
    "an empty conversation": ("a.jsonl", with_value(prompt=[]), bad("the prompt has no messages")),
    "an answer without messages": ("a.jsonl", with_value(chosen=[]), bad("`chosen` has no messages")),
    "an answer of whitespace": ("a.jsonl", with_value(chosen=" \n"), Loads(2, {"empty_response": 1})),
    "a role that is a number": ("a.jsonl", with_value(prompt=[turn(1, "x")]), bad("has no role")),
    "a role of a megabyte": ("a.jsonl", with_value(prompt=[turn("x" * 10**6, "x")]), bad("has the unknown role 'xxx")),
    "a message without content": ("a.jsonl", with_value(prompt=[{"role": "user"}]), bad("has no content")),
    "content that is a number": ("a.jsonl", with_value(prompt=[turn("user", 5)]), bad("content that is not text: int")),
    "an image in a message": (
        "a.jsonl",
        with_value(prompt=[turn("user", [{"type": "image_url", "image_url": {}}])]),
        bad("content that is not text: list"),
    ),
    "two system messages": ("a.jsonl", with_value(prompt=[turn("system", "a"), turn("system", "b")]), Loads(3)),
    "a system column that conflicts with the prompt": (
        "a.jsonl",
        with_value(prompt=[turn("system", "a"), turn("user", "b")], system="c"),
        bad("`system` conflicts with the prompt's system message"),
    ),
    "a system that is a list": ("a.jsonl", with_value(system=["a"]), bad("`system` must be text, got list")),
    "an answer that ends with a user turn": (
        "a.jsonl",
        with_value(chosen=[turn("assistant", "a"), turn("user", "b")]),
        bad("must begin and end with an assistant turn"),
    ),
    "an answer of 2,000 turns": (
        "a.jsonl",
        with_value(chosen=[turn(("assistant", "user")[n % 2], "a") for n in range(2001)]),
        bad("`chosen` has 2001 messages; the limit is 1000"),
    ),
    "tools that are a number": ("a.jsonl", with_value(tools=5), bad("`tools` must be a list of objects, got int")),
    "tools that are one object": ("a.jsonl", with_value(tools={"name": "x"}), bad("`tools` must be a list of objects")),
    "tools that are lists": ("a.jsonl", with_value(tools=[[1]]), bad("`tools` must be a list of objects")),
    "tools that are not JSON": ("a.jsonl", with_value(tools="[{]"), bad("`tools` is text but not JSON")),
    "tools nested 300 deep": ("a.jsonl", with_value(tools=DEEP_TOOLS), bad("`tools` cannot be read: nested more than")),
    "a margin that is NaN": (
        "a.jsonl",
        between_good(line(GOOD)[:-2] + b', "margin": NaN}\n'),
        bad("`margin` must be a fini"),
    ),
    "a margin that is not a number": (
        "a.jsonl",
        with_value(margin={"a": 1}),
        bad("`margin` must be a number, got a dict"),
    ),
    "a margin of 400 digits": ("a.jsonl", with_value(margin=10**400), bad("`margin` must be a finite number")),
    "a margin beyond float32": ("a.jsonl", with_value(margin=1e300), bad("`margin` must be a finite number")),
    "a weight that is infinite": (
        "a.jsonl",
        between_good(line(GOOD)[:-2] + b', "weight": Infinity}\n'),
        bad("`weight` must be a finite number"),
    ),
    "a weight that is negative": ("a.jsonl", with_value(weight=-1), bad("`weight` must not be negative")),
    "history that is not text": (
        "a.jsonl",
        lines(
            {"instruction": "a", "chosen": "b", "rejected": "c"},
            {"instruction": "a", "history": [[None, 5]], "chosen": "b", "rejected": "c"},
            {"instruction": "d", "chosen": "b", "rejected": "c"},
        ),
        bad("`history` must contain only text"),
    ),
}
CASES = {**ENCODINGS, **JSON, **CSV, **COMPRESSED, **TABLES, **PATHS, **VALUES}


@pytest.fixture(autouse=True)
def time_limit() -> Iterator[None]:
    def end(number: int, frame: Any) -> None:
        raise AssertionError(f"not done after {SECONDS} seconds")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def test_the_table_states_the_number_of_cases() -> None:
    counts = [
        int(row.split("|")[2]) for row in (__doc__ or "").splitlines() if row.startswith("| ") and "cases" not in row
    ]
    assert counts == [len(each) for each in (ENCODINGS, JSON, CSV, COMPRESSED, TABLES, PATHS, VALUES)]
    assert sum(counts) >= 40


@pytest.mark.parametrize("case", CASES)
def test_every_row_is_kept_or_counted_or_the_file_is_rejected(tmp_path: Path, chat_tokenizer: Any, case: str) -> None:
    name, content, outcome = CASES[case]
    path = tmp_path / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        content(path)
    settings = DataSettings(str(path), on_bad_row="quarantine", sequence_length=200)
    if isinstance(outcome, Rejected):
        with pytest.raises(UserError) as error:
            prepare(settings, chat_tokenizer, tmp_path / "s")
        assert outcome.message in str(error.value)
        assert str(path) in str(error.value)
        assert len(str(error.value)) < 5000
        assert not (tmp_path / "s").exists()
        return
    report = prepare(settings, chat_tokenizer, tmp_path / "s")
    if isinstance(outcome, Loads):
        assert (report.pairs_kept, report.bad_rows, report.dropped) == (outcome.kept, 0, outcome.dropped)
        return
    assert (report.pairs_kept, report.bad_rows) == (outcome.kept, len(outcome.numbers))
    quarantined = [json.loads(each) for each in (tmp_path / "s.quarantine.jsonl").read_text("utf-8").splitlines()]
    assert tuple(each["number"] for each in quarantined) == outcome.numbers
    assert outcome.reason in quarantined[0]["reason"]
    assert len(quarantined[0]["reason"]) < 500
    with pytest.raises(UserError) as stopped:
        prepare(DataSettings(str(path)), chat_tokenizer, tmp_path / "t")
    where = f"{path}, {quarantined[0]['unit']} {outcome.numbers[0]}"
    assert str(stopped.value).startswith(f"1 of {report.rows_read} rows is bad; first: {where}: ")
    assert outcome.reason in str(stopped.value)


def test_a_decompression_bomb_uses_bounded_memory(tmp_path: Path, chat_tokenizer: Any) -> None:
    size = 400_000_000
    with gzip.open(tmp_path / "a.jsonl.gz", "wb", 1) as stream:
        stream.write(line(GOOD))
        for _ in range(size // 10_000_000):
            stream.write(b"0" * 10_000_000)
    tracemalloc.start()
    try:
        settings = DataSettings(str(tmp_path / "a.jsonl.gz"), on_bad_row="skip")
        report = prepare(settings, chat_tokenizer, tmp_path / "s")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (report.pairs_kept, report.bad_rows) == (1, 1)
    assert peak < 4 * MAX_ROW_BYTES < size


def test_a_line_that_covers_many_spans_is_one_bad_row(tmp_path: Path, chat_tokenizer: Any) -> None:
    (tmp_path / "a.jsonl").write_bytes(between_good(b"[" + b" " * (MAX_ROW_BYTES + 9_000_000) + b"\n"))
    report = prepare(DataSettings(str(tmp_path / "a.jsonl"), on_bad_row="skip"), chat_tokenizer, tmp_path / "s")
    assert (report.rows_read, report.pairs_kept, report.bad_rows) == (3, 2, 1)


def test_a_transcript_of_a_million_labels_is_read_in_linear_time(tmp_path: Path, chat_tokenizer: Any) -> None:
    good = {"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "\n\nHuman: a\n\nAssistant: c"}
    many = "\n\nHuman:" * 300_000
    hostile = {"chosen": f"{many} a\n\nAssistant: b", "rejected": f"{many} a\n\nAssistant: c"}
    (tmp_path / "a.jsonl").write_bytes(lines(good, hostile))
    report = prepare(DataSettings(str(tmp_path / "a.jsonl"), sequence_length=99), chat_tokenizer, tmp_path / "s")
    assert (report.pairs_kept, report.dropped) == (1, {"too_long": 1})


def test_bad_rows_of_an_array_can_be_pickled(
    tmp_path: Path, chat_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "ROWS_PER_BLOCK", 1)  # enough blocks for two processes
    deep = b"[" * 900 + b"]" * 900
    (tmp_path / "a.json").write_bytes(
        b"[" + line(GOOD) + b"," + deep + b"," + line({"\ud800": 1}) + b"," + line(OTHER) + b"]"
    )
    settings = DataSettings(str(tmp_path / "a.json"), on_bad_row="skip", num_processes=2)
    report = prepare(settings, chat_tokenizer, tmp_path / "s")
    assert (report.pairs_kept, report.bad_rows) == (2, 2)


def test_a_file_that_disappears_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(GOOD))
    (source,) = resolve_sources([str(tmp_path / "a.jsonl")])
    (tmp_path / "a.jsonl").unlink()
    with pytest.raises(UserError, match=r"a.jsonl' cannot be opened: .*No such file"):
        source_digest(source)


def test_a_broken_symlink_in_a_glob_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(GOOD))
    (tmp_path / "b.jsonl").symlink_to("gone.jsonl")
    with pytest.raises(UserError, match=r"b.jsonl' is a broken symlink to 'gone.jsonl'"):
        resolve_sources([str(tmp_path / "*.jsonl")])
