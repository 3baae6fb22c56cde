"""The cache of prepared stores: runs share entries, damage is detected, and entries can be removed at any time."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.small_tokenizer import make_tokenizer
from thresher.builders.data import open_stores
from thresher.config import parse_config
from thresher.data.prepare.prepare import prepare
from thresher.data.store import cache as store_cache
from thresher.data.store.cache import StoreCache, list_stores
from thresher.data.store.reader import ExampleStore
from thresher.errors import UserError

ROWS = [{"prompt": f"{word}? ", "chosen": "good and long", "rejected": f"bad {word}"} for word in ("one", "two", "six")]
build_pairs = prepare


class Runs:
    """Opens the store of a run as `train` does; prepared names the runs that had to prepare it."""

    def __init__(self, directory: Path, file_name: str) -> None:
        self.directory = directory
        self.file_name = file_name
        self.prepared: list[str] = []

    def open(self, name: str, tokenizer: Any = None, **settings: Any) -> ExampleStore:
        data = {"file_name": self.file_name, "template": "raw"}
        top = {key: settings.pop(key) for key in ("sequence_length", "cache_dir") if key in settings}
        values = {"output_dir": str(self.directory / name), "actor_train": {"data_args": data | settings}, **top}

        def build(*arguments: Any) -> None:
            self.prepared.append(name)
            build_pairs(*arguments)

        return open_stores(parse_config(values), tokenizer or make_tokenizer(), build)[0]


@pytest.fixture
def runs(tmp_path, write_rows) -> Runs:
    return Runs(tmp_path, write_rows(*ROWS))


def entry_of(reference_cache: Path) -> Path:
    (entry,) = (path for path in (reference_cache / "stores").iterdir() if not path.name.startswith("."))
    return entry


def content(store: ExampleStore) -> dict[str, bytes]:
    return {name: (store.path / name).read_bytes() for name in store.file_names}


def test_a_run_in_another_directory_prepares_nothing(runs, reference_cache, caplog):
    caplog.set_level("INFO")
    first = runs.open("first")
    written = {name: (first.path / name).stat().st_mtime_ns for name in first.file_names}
    second = runs.open("second")
    assert runs.prepared == ["first"]
    entry = entry_of(reference_cache)
    assert caplog.messages == [f"using prepared pairs from the cache in {second.path}"]
    assert entry.name == first.fingerprint
    assert second.path == runs.directory / "second" / "data" / f"train-{first.fingerprint[:12]}"
    assert content(second) == content(first)
    # the same files, not copies
    assert {name: (second.path / name).stat().st_mtime_ns for name in second.file_names} == written
    assert all((second.path / name).stat().st_nlink == 3 for name in second.file_names)
    assert [path.name for path in second.path.parent.iterdir()] == [second.path.name]


def test_a_run_finds_the_store_that_an_earlier_version_prepared(runs):
    """Versions up to 0.2 named it by its fingerprint alone."""
    store = runs.open("run")
    store.path.rename(earlier := store.path.with_name(store.fingerprint[:16]))
    runs.prepared.clear()
    assert runs.open("run").path == earlier
    assert runs.prepared == []


@pytest.mark.parametrize(
    "changes",
    [
        {"tokenizer": make_tokenizer(eos_token="</s>")},
        {"template": "template.jinja"},
        {"sequence_length": 9},
        {"truncation": "response_end"},
        {"special_tokens_in_text": "reject"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_another_tokenizer_template_or_setting_misses(runs, reference_cache, changes, monkeypatch):
    monkeypatch.chdir(runs.directory)
    Path("template.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    runs.open("first")
    runs.open("second", **changes)
    assert runs.prepared == ["first", "second"]
    assert len(list_stores(reference_cache / "stores")) == 2


def test_other_rows_miss_and_the_same_rows_under_another_name_hit(runs, write_rows):
    runs.open("first")
    write_rows(*ROWS, name="copy.jsonl")
    runs.file_name = str(runs.directory / "copy.jsonl")
    runs.open("copy")
    assert runs.prepared == ["first"]
    write_rows(*ROWS[:2], name="copy.jsonl")
    runs.open("fewer")
    assert runs.prepared == ["first", "fewer"]


def test_a_store_in_the_run_directory_is_used_first(runs, reference_cache):
    runs.open("first")
    shutil.rmtree(reference_cache)
    runs.open("first")
    assert runs.prepared == ["first"]
    assert not reference_cache.exists()  # also nothing is written


def test_a_run_survives_the_removal_of_its_entry_and_a_new_run_prepares_again(runs, reference_cache):
    expected = content(runs.open("first"))
    runs.open("second")
    shutil.rmtree(reference_cache)
    assert content(runs.open("second")) == expected
    assert runs.prepared == ["first"]
    assert content(runs.open("third")) == expected
    assert runs.prepared == ["first", "third"]
    assert content(runs.open("fourth")) == expected
    assert runs.prepared == ["first", "third"]


def flip_a_byte(entry: Path) -> None:
    replace(entry / "lengths.bin", lambda old: bytes([old[0] ^ 1]) + old[1:])


def truncate(entry: Path) -> None:
    replace(entry / "shards" / "00000.arrow", lambda old: old[:-1])


def break_manifest(entry: Path) -> None:
    replace(entry / "manifest.json", lambda old: old[:20])


def rename_identity(entry: Path) -> None:
    replace(entry / "manifest.json", lambda old: old.replace(entry.name.encode(), b"0" * 64))


def remove_file(entry: Path) -> None:
    (entry / "lengths.bin").unlink()


def link_elsewhere(entry: Path) -> None:
    (entry / "lengths.bin").rename(entry.parent / "elsewhere")
    (entry / "lengths.bin").symlink_to(entry.parent / "elsewhere")


def replace(path: Path, change: Callable[[bytes], bytes]) -> None:
    old = path.read_bytes()
    path.unlink()  # the run that prepared it has a hard link to the file
    path.write_bytes(change(old))


@pytest.mark.parametrize(
    "damage", [flip_a_byte, truncate, break_manifest, rename_identity, remove_file, link_elsewhere]
)
def test_a_damaged_entry_is_reported_set_aside_and_prepared_again(runs, reference_cache, caplog, damage):
    expected = content(runs.open("first"))
    entry = entry_of(reference_cache)
    damage(entry)
    assert content(runs.open("second")) == expected
    assert runs.prepared == ["first", "second"]
    (message,) = caplog.messages
    assert message.startswith(f"store cache: {entry} is set aside, and its pairs are prepared again: ")
    assert [path.name[:9] for path in entry.parent.glob(".damaged*")] == [".damaged-"]
    assert content(runs.open("third")) == expected  # from the new entry
    assert runs.prepared == ["first", "second"]


def test_a_cache_on_another_file_system_is_copied(runs, monkeypatch):
    def link(*_: object, **__: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(store_cache.os, "link", link)
    first, second = runs.open("first"), runs.open("second")
    assert runs.prepared == ["first"]
    assert content(second) == content(first)
    assert all((second.path / name).stat().st_nlink == 1 for name in second.file_names)


def test_a_cache_that_cannot_be_written_is_reported_and_does_no_harm(runs, reference_cache, caplog):
    reference_cache.write_text("a file in place of the directory")
    assert len(runs.open("first")) == len(ROWS)
    (message,) = caplog.messages
    assert message.startswith(f"could not add the prepared pairs to the cache in {reference_cache / 'stores'}: ")
    assert message.endswith("other runs prepare them again. Set cache_dir to a writable directory")


def test_a_read_only_cache_serves_its_entries(runs, reference_cache, caplog, monkeypatch):
    runs.open("first")
    for name in ("utime", "open"):
        call = getattr(os, name)

        def refuse_there(path: Any, *arguments: Any, call: Callable[..., Any] = call, **named: Any) -> Any:
            if str(path).startswith(str(reference_cache)):
                raise PermissionError(13, "Permission denied")
            return call(path, *arguments, **named)

        monkeypatch.setattr(store_cache.os, name, refuse_there)
    runs.open("second")
    assert (runs.prepared, caplog.messages) == (["first"], [])


def test_cache_dir_sets_the_location(runs, reference_cache):
    runs.open("first", cache_dir=str(runs.directory / "here"))
    assert len(list_stores(runs.directory / "here" / "stores")) == 1
    assert not reference_cache.exists()
    runs.open("second")
    assert runs.prepared == ["first", "second"]


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"THRESHER_CACHE_DIR": "~/shared", "XDG_CACHE_HOME": "/xdg"}, "/home/me/shared/stores"),
        ({"XDG_CACHE_HOME": "/xdg"}, "/xdg/thresher/stores"),
        ({}, "/home/me/.cache/thresher/stores"),
    ],
)
def test_the_default_location_is_beside_the_reference_cache(monkeypatch, environment, expected):
    for name in ("THRESHER_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in ({"HOME": "/home/me"} | environment).items():
        monkeypatch.setenv(name, value)
    assert StoreCache(None).root == Path(expected)


def test_a_store_with_quarantined_rows_is_not_shared(runs, write_rows, reference_cache):
    write_rows(*ROWS, {"prompt": 5})
    for name in ("first", "second"):
        store = runs.open(name, on_bad_row="quarantine")
        assert store.path.with_name(f"{store.path.name}.quarantine.jsonl").exists()
    assert runs.prepared == ["first", "second"]
    assert list_stores(reference_cache / "stores") == []


@pytest.mark.parametrize("names", ["abc", "aaa"], ids=["three directories", "one directory"])
def test_of_runs_that_start_together_one_prepares_and_the_others_wait(runs, caplog, monkeypatch, names):
    caplog.set_level("INFO")
    begun, tokenizers, stores = threading.Event(), [make_tokenizer() for _ in names], []

    def prepare_late(*arguments: Any) -> None:
        begun.set()
        wait_for_message(caplog, "another process is preparing the same pairs; waiting for it", count=2)
        prepare(*arguments)

    monkeypatch.setattr(f"{__name__}.build_pairs", prepare_late)
    threads = [
        threading.Thread(target=lambda at=at: stores.append(runs.open(names[at], tokenizers[at]))) for at in range(3)
    ]
    threads[0].start()
    assert begun.wait(60)
    for thread in threads[1:]:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert runs.prepared == ["a"]
    assert [store.digest for store in stores] == [stores[0].digest] * 3


def wait_for_message(caplog: pytest.LogCaptureFixture, message: str, count: int) -> None:
    end = time.monotonic() + 60
    while caplog.messages.count(message) < count:
        assert time.monotonic() < end
        time.sleep(0.01)


def test_two_processes_that_add_one_store_leave_one_entry(runs, reference_cache, caplog):
    store = runs.open("first")
    cache = StoreCache(None)
    threads = [threading.Thread(target=cache.add, args=(store,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [path.name for path in (reference_cache / "stores").iterdir()] == [store.fingerprint]
    assert caplog.messages == []


def test_a_failed_preparation_adds_nothing_and_releases_the_cache(runs, write_rows, reference_cache):
    write_rows(*ROWS, {"prompt": 5})
    for _ in range(2):
        with pytest.raises(UserError, match="line 4"):
            runs.open("first")
    assert list((reference_cache / "stores").iterdir()) == []
