"""A killed preparation resumes, produces the same bytes, and leaves no other files."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from tests.support.flushes import record_flushed_inodes
from tests.support.forks import python
from tests.support.small_tokenizer import make_tokenizer
from thresher.data.prepare.prepare import PrepareProgress, prepare
from thresher.data.settings import DataSettings
from thresher.data.store.reader import ExampleStore
from thresher.data.store.writer import Staging
from thresher.errors import UserError

SHARD_ROWS = 200


def files_of(directory: Path) -> dict[str, bytes]:
    return {str(file.relative_to(directory)): file.read_bytes() for file in directory.rglob("*") if file.is_file()}


def write_files(write_rows: Any, rows_per_file: int = 700) -> list[str]:
    """Write three files of pairs with one bad row each, and two of labelled rows to be joined with each other."""
    names = []
    for file in range(3):
        rows = [
            {"prompt": f"q{file}-{n}?", "chosen": "yes " * (n % 7 + 1), "rejected": "no " * (n % 5)}
            for n in range(rows_per_file)
        ]
        rows[600] = {"broken": file}
        names.append(write_rows(*rows, name=f"{file}.jsonl"))
    for number, label in enumerate((True, False)):
        rows = [{"prompt": f"l{n % 90}", "completion": f"a{n}{label}", "label": label} for n in range(300)]
        names.insert(2 * number, write_rows(*rows, name=f"labels{number}.jsonl"))
    return names


def kill_and_finish(output: Path, log: Path, executor: str, files: list[str], kills: list[int]) -> list[str]:
    """Return the blocks that were processed, over all processes."""
    arguments = [str(output), str(log), str(SHARD_ROWS), executor, ",".join(files), *map(str, kills)]
    command = [*python(), "-m", "tests.support.prepare_and_kill", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return log.read_text().splitlines()


@pytest.mark.slow
@pytest.mark.distributed
def test_a_killed_preparation_gives_the_same_bytes_and_repeats_few_blocks(tmp_path: Path, write_rows: Any) -> None:
    files = write_files(write_rows, rows_per_file=2000)
    uninterrupted = kill_and_finish(tmp_path / "uninterrupted", tmp_path / "uninterrupted.log", "local:1", files, [])
    killed = kill_and_finish(tmp_path / "killed", tmp_path / "killed.log", "local:1", files, [3, 1])
    assert files_of(tmp_path / "killed") == files_of(tmp_path / "uninterrupted")
    assert len(ExampleStore.open(tmp_path / "uninterrupted").manifest["shards"]) > 4
    quarantined = [(tmp_path / f"{name}.quarantine.jsonl").read_bytes() for name in ("uninterrupted", "killed")]
    assert quarantined[0] == quarantined[1]
    assert [json.loads(line)["number"] for line in quarantined[0].splitlines()] == [601] * 3
    # each kill repeats at most the blocks since the last checkpoint, which is saved with every shard
    assert len(uninterrupted) < len(killed) <= len(uninterrupted) + 2 * 2
    assert set(killed) == set(uninterrupted)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


@pytest.mark.slow
def test_a_kill_while_a_resumed_shard_is_copied_does_not_change_the_bytes(
    tmp_path: Path, write_rows: Any, chat_tokenizer: PreTrainedTokenizerFast
) -> None:
    """A crash during `StoreWriter._copy_torn_shard` leaves the torn shard intact and a partial copy of it."""
    settings = DataSettings(
        write_files(write_rows, rows_per_file=2000), on_bad_row="skip", join_labelled=True, shard_rows=4000
    )
    prepare(settings, chat_tokenizer, tmp_path / "uninterrupted")
    stop_after(2, settings, chat_tokenizer, tmp_path / "s", pairs_per_checkpoint=1000)
    (shard,) = (tmp_path / ".s.partial" / "content" / "shards").iterdir()
    shard.rename(shard.with_suffix(".torn"))
    shard.write_bytes(b"partial copy")
    prepare(settings, chat_tokenizer, tmp_path / "s")
    assert files_of(tmp_path / "s") == files_of(tmp_path / "uninterrupted")


def test_damaged_staged_work_is_discarded(
    tmp_path: Path, write_rows: Any, chat_tokenizer: PreTrainedTokenizerFast
) -> None:
    settings = DataSettings(write_files(write_rows), join_labelled=True, on_bad_row="skip", shard_rows=SHARD_ROWS)
    prepare(settings, chat_tokenizer, tmp_path / "uninterrupted")
    stop_after(2, settings, chat_tokenizer, tmp_path / "s")
    (tmp_path / ".s.partial" / "content" / "shards" / "00000.arrow").write_bytes(b"torn")
    prepare(settings, chat_tokenizer, tmp_path / "s")
    assert files_of(tmp_path / "s") == files_of(tmp_path / "uninterrupted")


def test_columns_that_only_finished_shards_use_are_kept(
    tmp_path: Path, write_rows: Any, chat_tokenizer: PreTrainedTokenizerFast
) -> None:
    pairs = [{"prompt": f"q{n}?", "chosen": "yes", "rejected": "no"} for n in range(2000)]
    names = [write_rows(*({**pair, "weight": 2.0} for pair in pairs[:100]), name="weighted.jsonl")]
    names.append(write_rows(*pairs[100:], name="plain.jsonl"))
    settings = DataSettings(names, shard_rows=SHARD_ROWS)
    prepare(settings, chat_tokenizer, tmp_path / "uninterrupted")
    stop_after(2, settings, chat_tokenizer, tmp_path / "s")
    prepare(settings, chat_tokenizer, tmp_path / "s")
    assert ExampleStore.open(tmp_path / "s").manifest["columns_in_use"] == ["weight"]
    assert files_of(tmp_path / "s") == files_of(tmp_path / "uninterrupted")


class InterruptedPreparation(Exception):  # noqa: N818
    pass


def stop_after(
    num_checkpoints: int, settings: DataSettings, tokenizer: Any, output: Path, pairs_per_checkpoint: int = SHARD_ROWS
) -> None:
    """Interrupt a preparation as Ctrl-C would."""
    from thresher.data.store import writer as store_writer

    def stop(progress: PrepareProgress) -> None:
        if progress.pairs_kept > (num_checkpoints + 1) * pairs_per_checkpoint:
            raise InterruptedPreparation

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store_writer, "PAIRS_PER_CHECKPOINT", pairs_per_checkpoint)
        with pytest.raises(InterruptedPreparation):
            prepare(settings, tokenizer, output, stop)


def first_progress(settings: DataSettings, tokenizer: Any, output: Path) -> int:
    seen: list[PrepareProgress] = []
    prepare(settings, tokenizer, output, seen.append)
    return seen[0].rows_read


@pytest.mark.parametrize(
    "change",
    [
        {"sequence_length": 99},
        {"shard_rows": 601},
        {"template": "raw"},
        {"on_bad_row": "quarantine"},
    ],
)
def test_staged_work_with_other_settings_is_discarded(
    tmp_path: Path, write_rows: Any, chat_tokenizer: PreTrainedTokenizerFast, change: dict[str, Any]
) -> None:
    settings = DataSettings(write_files(write_rows), join_labelled=True, on_bad_row="skip", shard_rows=SHARD_ROWS)
    stop_after(2, settings, chat_tokenizer, tmp_path / "s")
    assert (tmp_path / ".s.partial" / "progress.json").is_file()
    changed = replace(settings, **change)
    assert first_progress(changed, chat_tokenizer, tmp_path / "s") <= 512
    prepare(changed, chat_tokenizer, tmp_path / "fresh")
    assert files_of(tmp_path / "s") == files_of(tmp_path / "fresh")
    assert not (tmp_path / ".s.partial").exists()


def test_other_rows_or_another_tokenizer_restart_and_the_same_resume(
    tmp_path: Path, write_rows: Any, chat_tokenizer: PreTrainedTokenizerFast
) -> None:
    settings = DataSettings(write_files(write_rows), join_labelled=True, on_bad_row="skip", shard_rows=SHARD_ROWS)
    stop_after(2, settings, chat_tokenizer, tmp_path / "s")
    assert first_progress(settings, chat_tokenizer, tmp_path / "s") > 600

    other = make_tokenizer(eos_token="</s>")
    other.chat_template = chat_tokenizer.chat_template
    stop_after(2, settings, chat_tokenizer, tmp_path / "t")
    assert first_progress(settings, other, tmp_path / "t") <= 512

    stop_after(2, settings, chat_tokenizer, tmp_path / "u")
    with Path(settings.file_names[-1]).open("a") as stream:
        stream.write('{"prompt": "one", "chosen": "more", "rejected": "row"}\n')
    assert first_progress(settings, chat_tokenizer, tmp_path / "u") <= 512


def test_an_old_store_is_intact_until_the_new_one_is_complete(
    tmp_path: Path, write_rows: Any, chat_tokenizer: PreTrainedTokenizerFast
) -> None:
    settings = DataSettings(write_files(write_rows), join_labelled=True, on_bad_row="skip", shard_rows=SHARD_ROWS)
    prepare(settings, chat_tokenizer, tmp_path / "s")
    before = files_of(tmp_path / "s")

    def stop(progress: PrepareProgress) -> None:
        if progress.pairs_kept > 700:
            raise InterruptedPreparation

    shorter = replace(settings, sequence_length=30)
    with pytest.raises(InterruptedPreparation):
        prepare(shorter, chat_tokenizer, tmp_path / "s", stop, overwrite=True)
    assert files_of(tmp_path / "s") == before
    prepare(shorter, chat_tokenizer, tmp_path / "s", overwrite=True)
    assert files_of(tmp_path / "s") != before
    ExampleStore.open(tmp_path / "s").verify()


def test_an_old_store_is_restored_after_a_crash_between_the_two_renames(tmp_path: Path) -> None:
    output = tmp_path / "s"
    staging = Staging(output, "fingerprint")
    staging.save({})
    (output / "shards").mkdir(parents=True)
    output.rename(staging.directory / "replaced")
    staging.close(failed=True)
    staging = Staging(output, "fingerprint")
    assert staging.state == {}
    assert (output / "shards").is_dir()
    staging.close(failed=False)
    assert [path.name for path in tmp_path.iterdir()] == ["s"]


def test_progress_is_flushed_to_the_disk_before_it_replaces_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed = record_flushed_inodes(monkeypatch)
    staging = Staging(tmp_path / "s", "fingerprint")
    staging.save({})
    assert (staging.directory / "progress.json").stat().st_ino in flushed
    staging.close(failed=False)


def test_two_processes_cannot_write_the_same_store_at_once(tmp_path: Path) -> None:
    staging = Staging(tmp_path / "s")
    with pytest.raises(UserError, match="another process is writing"):
        Staging(tmp_path / "s")
    Staging(tmp_path / "t").close(failed=False)
    staging.close(failed=False)
    assert list(tmp_path.iterdir()) == []


def test_a_bad_row_error_leaves_no_staged_work(
    tmp_path: Path, write_rows: Any, chat_tokenizer: PreTrainedTokenizerFast
) -> None:
    settings = DataSettings(write_files(write_rows), join_labelled=True, shard_rows=100)
    with pytest.raises(UserError, match="line 601"):
        prepare(settings, chat_tokenizer, tmp_path / "s")
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
