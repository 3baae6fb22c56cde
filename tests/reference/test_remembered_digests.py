"""A model file is hashed once; a changed file is hashed again, and nothing but the user's own records is believed."""

from __future__ import annotations

import json
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.tiny_llama import save_tiny_llama
from thresher.reference import fingerprint
from thresher.reference.fingerprint import DIRECTORY_NAME, weights_digest

AN_HOUR = 3600


class Counter:
    """Counts the tensors that are hashed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        original = fingerprint._digest_tensor

        def counted(tensor: torch.Tensor) -> str:
            self.count += 1
            return original(tensor)

        monkeypatch.setattr(fingerprint, "_digest_tensor", counted)

    def hashed(self, model: Path) -> tuple[bool, str]:
        before = self.count
        digest = weights_digest(str(model))
        return self.count > before, digest


def age(file: Path, seconds: int = AN_HOUR) -> None:
    os.utime(file, (time.time() - seconds,) * 2)


@pytest.fixture
def model(tmp_path) -> Path:
    save_tiny_llama(tmp_path / "model", seed=0)
    age(tmp_path / "model/model.safetensors")
    return tmp_path / "model"


@pytest.fixture
def counter(monkeypatch) -> Counter:
    return Counter(monkeypatch)


def record(reference_cache: Path) -> Path:
    (path,) = (reference_cache / DIRECTORY_NAME).iterdir()
    return path


def test_a_file_is_hashed_once_and_a_copy_of_it_again(model, counter, tmp_path):
    is_hashed, digest = counter.hashed(model)
    assert is_hashed
    assert counter.hashed(model) == (False, digest)
    assert counter.hashed(shutil.copytree(model, tmp_path / "copy")) == (True, digest)


def test_a_changed_file_is_hashed_again_even_with_its_old_size_and_time(model, counter):
    file = model / "model.safetensors"
    _, digest = counter.hashed(model)
    before, weights = file.stat(), load_file(file)
    weights["model.norm.weight"].view(torch.int32)[0] ^= 1
    content = bytes(file.read_bytes())
    save_file(weights, model / "other", metadata={"format": "pt"})
    changed = (model / "other").read_bytes()
    (model / "other").unlink()
    assert len(changed) == len(content)
    with file.open("r+b") as stream:  # the same inode
        stream.write(changed)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = file.stat()
    assert (after.st_size, after.st_mtime_ns, after.st_ino) == (before.st_size, before.st_mtime_ns, before.st_ino)
    is_hashed, other = counter.hashed(model)
    assert is_hashed
    assert other != digest


def test_a_file_that_was_just_written_is_not_remembered(model, counter, reference_cache):
    age(model / "model.safetensors", seconds=0)
    assert counter.hashed(model)[0]
    assert counter.hashed(model)[0]
    assert not (reference_cache / DIRECTORY_NAME).exists()


def damage_text(path: Path) -> None:
    path.write_text(path.read_text()[:-20])


def forge_digest(path: Path) -> None:
    content = json.loads(path.read_text())
    content["digests"] = dict.fromkeys(content["digests"], "0")
    path.write_text(json.dumps(content))


def let_others_write(path: Path) -> None:
    path.chmod(0o666)


def link_to_another_place(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def put_a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def move_to_another_model(path: Path) -> None:
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"path": "/another/model.safetensors"}))


def nest(path: Path) -> None:
    path.write_text("[" * 100_000)


@pytest.mark.parametrize(
    "tamper",
    [
        damage_text,
        forge_digest,
        let_others_write,
        link_to_another_place,
        put_a_pipe,
        move_to_another_model,
        nest,
    ],
)
def test_a_damaged_or_foreign_record_is_ignored_and_replaced(model, counter, reference_cache, tamper):
    _, digest = counter.hashed(model)
    tamper(record(reference_cache))
    assert counter.hashed(model) == (True, digest)
    assert counter.hashed(model) == (False, digest)


def test_a_cache_that_cannot_be_written_changes_nothing(model, counter, reference_cache):
    reference_cache.parent.mkdir(parents=True, exist_ok=True)
    reference_cache.write_text("a file in the place of the directory")
    first, second = counter.hashed(model), counter.hashed(model)
    assert first == second
    assert first[0]


def test_runs_that_hash_the_same_file_at_once_leave_one_valid_record(model, counter, reference_cache):
    with ThreadPoolExecutor(8) as pool:
        digests = set(pool.map(lambda _: weights_digest(str(model)), range(16)))
    assert len(digests) == 1
    assert record(reference_cache).stat().st_mode & 0o777 == 0o600
    assert counter.hashed(model) == (False, digests.pop())
