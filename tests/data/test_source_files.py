"""Which files are read and in which order, and the errors when there is nothing to read."""

from __future__ import annotations

import bz2
import gzip
import json
from dataclasses import replace
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest

from thresher.data.rows.parsing import parse_row
from thresher.data.settings import DataSettings
from thresher.data.sources import readers
from thresher.data.sources.readers import ROWS_PER_BLOCK, read_blocks
from thresher.data.sources.resolve import at_revision, resolve_sources, source_digest
from thresher.errors import UserError

ROWS = [{"prompt": f"p{n}", "chosen": f"c{n} é\u2028", "rejected": f"r{n}"} for n in range(1200)]
TABLE = pa.Table.from_pylist(ROWS)


def lines(rows: list[dict[str, str]]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def zstd(content: bytes) -> bytes:
    return pa.compress(content, codec="zstd", asbytes=True)


def write(path: Path) -> None:
    name = path.name
    if ".parquet" in name:
        pyarrow.parquet.write_table(TABLE, path, row_group_size=100)
    elif name == "file.arrow":
        with pa.ipc.new_file(path, TABLE.schema) as sink:
            sink.write_table(TABLE)
    elif name == "stream.arrow":
        with pa.ipc.new_stream(path, TABLE.schema) as sink:
            sink.write_table(TABLE)
    elif ".csv" in name:
        pyarrow.csv.write_csv(TABLE, path)
    else:
        content = lines(ROWS) if ".jsonl" in name else json.dumps(ROWS).encode()
        compress = {".gz": gzip.compress, ".bz2": bz2.compress, ".zst": zstd}.get(path.suffix, bytes)
        path.write_bytes(compress(content))


def read(name: str | Path) -> list[dict[str, str]]:
    (source,) = resolve_sources([str(name)])
    rows = [content for block in read_blocks(source) for content in block.contents]
    return [json.loads(row) if isinstance(row, bytes) else row for row in rows]


@pytest.mark.parametrize(
    "name",
    [
        "a.json",
        "a.json.gz",
        "a.jsonl",
        "a.jsonl.gz",
        "a.jsonl.bz2",
        "a.jsonl.zst",
        "a.json.zst",
        "a.csv",
        "a.parquet",
        "file.arrow",
        "stream.arrow",
    ],
)
def test_every_format_yields_the_same_rows(tmp_path: Path, name: str) -> None:
    write(tmp_path / name)
    assert read(tmp_path / name) == ROWS


@pytest.mark.parametrize("name", ["data", "rows", "train", "examples"])
@pytest.mark.parametrize(
    "others", [{}, {"version": 1, "tags": ["a"], "author": {"name": "x"}}], ids=["alone", "beside"]
)
def test_a_json_object_with_one_list_of_objects_is_read_as_that_list(tmp_path: Path, name: str, others: dict) -> None:
    (tmp_path / "a.json").write_text(json.dumps({**others, name: ROWS}))
    assert read(tmp_path / "a.json") == ROWS


def test_a_json_object_with_one_list_alone_is_that_list_under_any_name(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"pairs of 2024": ROWS}))
    assert read(tmp_path / "a.json") == ROWS


@pytest.mark.parametrize(
    "row",
    [
        {"chosen": [{"role": "user"}], "rejected": [{"role": "user"}]},
        {"messages": [{"role": "user"}], "label": True},
        {"data": [{"a": 1}], "train": [{"a": 1}]},
        {"data": ["a"], "label": True},
    ],
)
def test_any_other_json_object_is_one_row(tmp_path: Path, row: dict) -> None:
    (tmp_path / "a.json").write_text(json.dumps(row))
    assert read(tmp_path / "a.json") == [row]


@pytest.mark.parametrize("name", ["a.json", "a.json.gz", "a.jsonl", "a.jsonl.gz", "a.csv", "a.parquet"])
def test_the_progress_in_a_file_grows_to_its_size(tmp_path: Path, name: str) -> None:
    write(tmp_path / name)
    (source,) = resolve_sources([str(tmp_path / name)])
    done = [block.bytes_done for block in read_blocks(source)]
    assert done[0] > 0
    assert done == sorted(done)
    assert done[-1] == (tmp_path / name).stat().st_size


def test_a_json_file_has_a_largest_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.json").write_bytes(content := b'[{"a": 1}]')
    monkeypatch.setattr(readers, "MAX_JSON_BYTES", len(content))
    assert read(tmp_path / "a.json") == [{"a": 1}]
    (tmp_path / "a.json").write_bytes(content + b" ")
    with pytest.raises(UserError, match=r"is larger than .* write one object per line, as \.jsonl"):
        read(tmp_path / "a.json")


def test_a_saved_dataset_yields_the_same_rows(tmp_path: Path) -> None:
    import datasets

    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
    assert read(tmp_path / "saved") == ROWS


def test_a_saved_dataset_of_several_splits_requires_one_split(tmp_path: Path) -> None:
    import datasets

    split = datasets.Dataset.from_list(ROWS[:2])
    datasets.DatasetDict({"train": split, "test": split}).save_to_disk(tmp_path / "saved")
    with pytest.raises(UserError, match=r"several splits \(test, train\); name one, such as .*/saved/train$"):
        resolve_sources([str(tmp_path / "saved")])
    assert read(tmp_path / "saved" / "test") == ROWS[:2]


def test_all_members_of_a_gzip_file_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines(ROWS[:600])) + gzip.compress(lines(ROWS[600:])))
    assert read(tmp_path / "a.jsonl.gz") == ROWS


def test_blank_lines_are_counted_but_ignored(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"a": 1}\n\n  \n{"a": 2}')
    (block,) = read_blocks(resolve_sources([str(tmp_path / "a.jsonl")])[0])
    assert block.numbers == (1, 4)
    assert block.where(1) == f"{tmp_path / 'a.jsonl'}, line 4"


def test_a_block_has_at_most_rows_per_block_rows(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet")
    blocks = list(read_blocks(resolve_sources([str(tmp_path / "a.parquet")])[0]))
    assert [len(block) for block in blocks] == [ROWS_PER_BLOCK, ROWS_PER_BLOCK, 1200 - 2 * ROWS_PER_BLOCK]
    assert blocks[-1].numbers[-1] == 1200


def test_a_file_name_string_is_one_file() -> None:
    assert DataSettings("abc.jsonl").file_names == ("abc.jsonl",)
    assert DataSettings(["a.jsonl", "b.jsonl"]).file_names == ("a.jsonl", "b.jsonl")


def test_listed_files_keep_their_order_and_globs_are_sorted(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "c.jsonl"):
        (tmp_path / name).write_text('{"a": 1}\n')
    listed = resolve_sources([str(tmp_path / "c.jsonl"), str(tmp_path / "[ab].jsonl")])
    assert [Path(source.name).name for source in listed] == ["c.jsonl", "a.jsonl", "b.jsonl"]


def test_a_relative_glob_gives_relative_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n')
    monkeypatch.chdir(tmp_path)
    assert [source.name for source in resolve_sources(["*.jsonl"])] == ["a.jsonl"]


def test_object_store_urls_are_read_through_fsspec() -> None:
    import fsspec

    with fsspec.open("memory://bucket/rows.jsonl", "wb") as stream:
        stream.write(lines(ROWS[:3]))
    assert read("memory://bucket/rows.jsonl") == ROWS[:3]
    (source,) = resolve_sources(["memory://bucket/*.jsonl"])
    assert source.name == "memory:///bucket/rows.jsonl"
    assert len(list(read_blocks(source))) == 1


def test_a_digest_depends_on_content_and_not_on_the_name(tmp_path: Path) -> None:
    for name, text in (("a.jsonl", "1"), ("b.jsonl", "1"), ("c.jsonl", "2")):
        (tmp_path / name).write_text(text)
    same, also, other = (source_digest(each) for each in resolve_sources([str(tmp_path / "*.jsonl")]))
    assert same == also != other


def test_a_missing_file_is_answered_with_what_is_there_but_not_with_hidden_files(tmp_path: Path) -> None:
    for name in (".gitignore", "zebra.csv"):
        (tmp_path / name).touch()
    with pytest.raises(UserError, match=r"pairs.jsonl' does not exist; '.*' contains zebra.csv$"):
        resolve_sources([str(tmp_path / "pairs.jsonl")])


def test_a_missing_file_suggests_the_nearest_one(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("{}")
    with pytest.raises(UserError, match=r"trian.jsonl' does not exist; did you mean .*train.jsonl\?"):
        resolve_sources([str(tmp_path / "trian.jsonl")])


def test_a_missing_directory_is_named() -> None:
    with pytest.raises(UserError, match="its directory 'nowhere' does not exist either"):
        resolve_sources(["nowhere/a.jsonl"])


def test_a_missing_name_of_a_hub_data_set_suggests_its_url() -> None:
    with pytest.raises(UserError, match=r"'trl-lib/x' does not exist; .*; a dataset of .* is named hf://trl-lib/x$"):
        resolve_sources(["trl-lib/x"])
    with pytest.raises(UserError, match=r"does not exist either$"):
        resolve_sources(["nowhere/a.jsonl"])


def test_a_glob_without_files_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text("[]")
    with pytest.raises(UserError, match=r"no file matches .*; did you mean .*rows.json\?"):
        resolve_sources([str(tmp_path / "row*.jsonl")])


@pytest.mark.parametrize(("name", "content"), [("a.jsonl", "\n\n"), ("a.json", "[]"), ("a.csv", "prompt,chosen\n")])
def test_a_file_without_rows_is_an_error(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=r"has no rows; write it again, or do not name it"):
        read(tmp_path / name)


def test_an_empty_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").touch()
    with pytest.raises(UserError, match="is empty; write it again"):
        resolve_sources([str(tmp_path / "a.jsonl")])


def test_an_unknown_suffix_lists_the_known_ones(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(UserError, match=r"unknown suffix .txt; use one of .json .jsonl"):
        resolve_sources([str(tmp_path / "a.txt")])


def test_json_lines_named_json_suggest_the_right_suffix(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(lines(ROWS[:2]))
    with pytest.raises(UserError, match=r"not valid JSON: .*; if it has one object per line, name it .jsonl"):
        read(tmp_path / "a.json")


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.parquet", "a.arrow"])
def test_a_truncated_file_is_an_error_and_not_fewer_rows(tmp_path: Path, name: str) -> None:
    full = tmp_path / ("file.arrow" if name == "a.arrow" else f"full.{name}")
    write(full)
    (tmp_path / name).write_bytes(full.read_bytes()[: full.stat().st_size // 2])
    with pytest.raises(UserError, match=r"cannot be read as .*check that the file is complete"):
        read(tmp_path / name)


def test_a_directory_of_files_of_one_format_is_read_in_sorted_order(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_bytes(lines(ROWS[2:4]))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines(ROWS[:2])))
    (tmp_path / ".gitattributes").write_text("hidden")
    listed = resolve_sources([f"{tmp_path}/"])
    assert [source.name for source in listed] == [f"{tmp_path}/a.jsonl.gz", f"{tmp_path}/b.jsonl"]
    contents = [content for source in listed for block in read_blocks(source) for content in block.contents]
    assert [json.loads(content) for content in contents] == ROWS[:4]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], "is a directory without data files: it is empty$"),
        (["README.md", "data/"], "is a directory without data files: it contains README.md, data$"),
        (["a.jsonl.gz", "b.csv"], r"it contains a.jsonl.gz, b.csv; name the files, such as '.*/\*.jsonl.gz'$"),
        (["README.md", "v1.jsonl"], r"that contains more than files of one format: .* such as '.*/\*.jsonl'$"),
        (["a.jsonl", "more/"], r"it contains a.jsonl, more; name the files, such as '.*/\*.jsonl'$"),
        (["a.txt", "b.txt"], r"a.txt': unknown suffix .txt; use one of .json"),
    ],
)
def test_any_other_directory_is_an_error_that_suggests_a_glob_of_its_files(
    tmp_path: Path, names: list[str], message: str
) -> None:
    for name in names:
        if name.endswith("/"):
            (tmp_path / name).mkdir()
        else:
            (tmp_path / name).write_text("x")
    with pytest.raises(UserError, match=message):
        resolve_sources([str(tmp_path)])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"file_name": []}, "names no file"),
        ({"file_name": "a", "truncation": "cut"}, "truncation is 'cut'; use one of drop, prompt_start, response_end"),
        ({"file_name": "a", "on_bad_row": "ignore"}, "on_bad_row is 'ignore'; use one of fail, skip, quarantine"),
        ({"file_name": "a", "sequence_length": 1}, "sequence_length must be at least 2, got 1"),
        ({"file_name": "a", "num_processes": 0}, "num_processes must be at least 1, got 0"),
    ],
)
def test_invalid_settings_are_rejected(settings: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        DataSettings(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("limit", [1, 3, 512, 700])
def test_only_the_first_rows_of_each_file_are_read(tmp_path: Path, limit: int) -> None:
    """Blank lines are not rows; formats that are read in several spans or record batches stop as well."""
    rows = [{"prompt": f"p{number}", "chosen": "a", "rejected": "b"} for number in range(600)]
    (tmp_path / "a.jsonl").write_bytes(b"\n\n" + lines(rows))
    (tmp_path / "b.json").write_text(json.dumps(rows))
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "c.parquet", row_group_size=100)
    for name in ("a.jsonl", "b.json", "c.parquet"):
        (source,) = resolve_sources([str(tmp_path / name)])
        blocks = list(read_blocks(replace(source, max_rows=limit)))
        found = [parse_row(content)["prompt"] for block in blocks for content in block.contents]
        assert found == [row["prompt"] for row in rows[:limit]]


@pytest.mark.parametrize(
    ("name", "revision", "asked"),
    [
        ("hf://org/pairs", None, ("org/pairs", None, "train", None)),
        ("hf://org/pairs", "v1.0", ("org/pairs", None, "train", "v1.0")),
        ("hf://org/pairs-1.5:test:small", "refs/pr/1", ("org/pairs-1.5", "small", "test", "refs/pr/1")),
        ("hf://org/pairs@abc:test", "v1.0", ("org/pairs", None, "test", "abc")),
    ],
)
def test_the_revision_of_a_hub_data_set_reaches_the_reader(
    monkeypatch: pytest.MonkeyPatch, name: str, revision: str | None, asked: tuple[str | None, ...]
) -> None:
    calls = []

    def load_dataset(repo: str, config: str | None, *, split: str, revision: str | None) -> datasets.Dataset:
        calls.append((repo, config, split, revision))
        return datasets.Dataset.from_list([{"prompt": "p", "chosen": "a", "rejected": "b"}])

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    (source,) = resolve_sources([at_revision(name, revision)])
    assert len(list(read_blocks(source))) == 1
    source_digest(source)
    assert calls == [asked, asked]


def test_a_revision_is_part_of_the_path_of_a_file_on_the_hub_and_of_no_other_name() -> None:
    assert at_revision("hf://datasets/org/pairs/a.parquet", "v1") == "hf://datasets/org/pairs@v1/a.parquet"
    for name in ("a.jsonl", "s3://bucket/a.jsonl", "dir/hf"):
        assert at_revision(name, "v1") == name
