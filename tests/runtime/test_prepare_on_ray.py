"""Data preparation on Ray Data writes the same bytes and raises the same errors as one process, also after a kill."""

from __future__ import annotations

import gzip
import json
import secrets
import subprocess
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import typer
from typer.testing import CliRunner

from tests.support.forks import python
from tests.support.small_tokenizer import make_tokenizer
from thresher.cli.prepare import prepare as prepare_command
from thresher.data.prepare.prepare import DataSettings, prepare
from thresher.data.sources import readers
from thresher.data.sources.readers import split_source
from thresher.data.sources.resolve import resolve_sources
from thresher.data.store.reader import ExampleStore
from thresher.errors import UserError
from thresher.runtime.ray.ray_data import run_on_ray

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def row(number: int, *, word: str = "yes") -> dict[str, Any]:
    return {"prompt": f"q{number}?", "chosen": f"{word} " * (number % 7 + 1), "rejected": "no " * (number % 5)}


def write_lines(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(f"{json.dumps(each)}\n" for each in rows))
    return str(path)


def many_files(directory: Path) -> list[str]:
    """Sources with several spans of lines and of row groups, blank lines, a bad row, and unpaired rows between them."""
    lines = write_lines(directory / "a.jsonl", [row(n) for n in range(1500)])
    with Path(lines).open("a") as stream:
        stream.write("\n" * 700 + '{"broken": 1}\n' + json.dumps(row(7)) + "\n\n\n")
    labels = [{"prompt": f"l{n % 9}", "completion": f"a{n}", "label": n % 2 == 0} for n in range(300)]
    pq.write_table(pa.Table.from_pylist([row(n, word="so") for n in range(900)]), directory / "c.parquet", 200)
    pa.csv.write_csv(pa.Table.from_pylist([row(n, word="csv") for n in range(50)]), directory / "d.csv")
    return [
        lines,
        write_lines(directory / "b.jsonl", labels),
        *(str(directory / f"{name}") for name in ("c.parquet", "d.csv")),
    ]


def files_of(store: Path) -> dict[str, bytes]:
    return {str(file.relative_to(store)): file.read_bytes() for file in store.rglob("*") if file.is_file()}


@pytest.fixture
def small_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "BYTES_PER_SPAN", 10_000)
    monkeypatch.setattr(readers, "ROWS_PER_SPAN", 300)


def test_one_process_and_one_and_two_ray_workers_give_the_same_bytes(
    tmp_path: Path, ray_here, small_spans: None
) -> None:
    names = [*many_files(tmp_path), f"file://{write_lines(tmp_path / 'url.jsonl', [row(n) for n in range(99)])}"]
    assert [len(split_source(source)) for source in resolve_sources(names)] == [11, 2, 3, 1, 1]
    settings = DataSettings(names, "raw", on_bad_row="quarantine", join_labelled=True, shard_rows=500)
    report = prepare(settings, make_tokenizer(), tmp_path / "here")
    assert (report.bad_rows, len(ExampleStore.open(tmp_path / "here").manifest["shards"])) == (1, 5)
    quarantined = (tmp_path / "here.quarantine.jsonl").read_bytes()
    assert json.loads(quarantined)["number"] == 2201
    for num_workers in (1, 2):
        output = tmp_path / f"ray{num_workers}"
        assert prepare(settings, make_tokenizer(), output, executor=run_on_ray(num_workers)) == report
        assert files_of(output) == files_of(tmp_path / "here")
        assert Path(f"{output}.quarantine.jsonl").read_bytes() == quarantined


@pytest.mark.hand  # CI has the messages of one process
def test_errors_have_the_same_message_as_in_one_process(tmp_path: Path, ray_here, small_spans: None) -> None:
    compressed = gzip.compress(
        "".join(f"{json.dumps(row(n, word=secrets.token_hex(40)))}\n" for n in range(5000)).encode()
    )
    (tmp_path / "cut.jsonl.gz").write_bytes(compressed[:-1000])
    names = many_files(tmp_path)
    for name, text in (
        (names, "a.jsonl, line 2201: no value"),
        (str(tmp_path / "cut.jsonl.gz"), "cannot be read as jsonl"),
    ):
        messages = []
        for runner in (None, run_on_ray(2)):
            with pytest.raises(UserError) as error:
                prepare(DataSettings(name, "raw"), make_tokenizer(), tmp_path / "s", executor=runner)
            messages.append(str(error.value))
        assert messages[0] == messages[1]
        assert text in messages[0]
    assert not (tmp_path / "s").exists()


def test_the_command_prepares_on_ray_with_an_option_or_a_config_key(
    tmp_path: Path, ray_here, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command uses the Ray session of the tests."""
    from thresher.runtime.ray import ray_data

    groups: list[tuple[int, int]] = []
    run_spans = ray_data._run_spans

    def counted(worker: Any, spans: Any, num_workers: int) -> Any:
        groups.append((len(spans), num_workers))
        return run_spans(worker, spans, num_workers)

    monkeypatch.setattr(ray_data, "_run_spans", counted)
    name = write_lines(tmp_path / "a.jsonl", [row(n) for n in range(40)])
    make_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text('{"model_type": "llama"}')
    config = tmp_path / "c.yaml"
    data_args = f"{{file_name: {name}, template: raw, preprocessing_num_workers: 2}}"
    config.write_text(f"pretrain: {tmp_path / 'model'}\nactor_train:\n  data_args: {data_args}\n")
    app = typer.Typer()
    app.command()(prepare_command)
    for output, *arguments in (
        ["local", name, "-m", str(tmp_path / "model"), "--template", "raw"],
        ["option", name, "-m", str(tmp_path / "model"), "--template", "raw", "--runtime", "ray", "-n", "2"],
        ["config", "--config", str(config), "runtime=ray"],
    ):
        result = CliRunner().invoke(app, [*arguments, "--output", str(tmp_path / output)])
        assert result.exit_code == 0, result.output
    assert groups == [(1, 2), (1, 2)]
    assert files_of(tmp_path / "local") == files_of(tmp_path / "option") == files_of(tmp_path / "config")


@pytest.mark.hand  # CI has the same without Ray
def test_a_killed_preparation_on_ray_resumes_and_writes_the_same_bytes(tmp_path: Path) -> None:
    names = [write_lines(tmp_path / f"{n}.jsonl", [row(n) for n in range(700)]) for n in range(4)]

    def run(output: Path, runner: str, *kills: int) -> list[str]:
        log = output.with_suffix(".log")
        arguments = [str(output), str(log), "400", runner, ",".join(names), *map(str, kills)]
        command = [*python(), "-m", "tests.support.prepare_and_kill", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return log.read_text().splitlines()

    uninterrupted = run(tmp_path / "uninterrupted", "local:1")
    killed = run(tmp_path / "killed", "ray:2", 5)
    assert files_of(tmp_path / "killed") == files_of(tmp_path / "uninterrupted")
    assert killed[:5] == uninterrupted[:5]
    assert set(killed) == set(uninterrupted)
    assert 0 < len(killed) - len(uninterrupted) <= 3  # blocks since the last checkpoint, of five
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
