"""Compiled code outlives a process, in a directory that no other user can change."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from thresher import durable
from thresher.runtime.devices import use_compile_cache

COMPILE = """
import json, sys
from thresher.runtime.devices import use_compile_cache

note = use_compile_cache(sys.argv[1])
import torch
from torch._dynamo.utils import counters

compiled = torch.compile(lambda x: torch.nn.functional.silu(x) * x.sum())
value = compiled(torch.arange(6.0)).sum().item()
print(json.dumps({"note": note, "value": value, **counters["inductor"]}))
"""


@pytest.fixture
def clean(monkeypatch, tmp_path):
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "THRESHER_CACHE_DIR"):
        monkeypatch.setenv(name, "")  # so that what the test sets is removed afterwards
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir(mode=0o700)


def private(path: Path) -> Path:
    path.mkdir(mode=0o700)
    return path


@pytest.mark.slow
def test_a_second_process_compiles_nothing(clean, tmp_path):
    found = []
    for _ in range(2):
        command = [sys.executable, "-c", COMPILE, str(private(tmp_path / "cache") if not found else tmp_path / "cache")]
        found.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    first, second = found
    assert first["fxgraph_cache_miss"] == 1
    assert second["fxgraph_cache_hit"] == 1
    assert "fxgraph_cache_miss" not in second
    assert second["value"] == first["value"]


def test_the_directory_is_for_this_user_alone_and_the_environment_names_it(clean, tmp_path):
    note = use_compile_cache(str(private(tmp_path / "cache")))
    path = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    assert note == f"compiled code: {path}"
    assert path.parent == tmp_path / "cache" / "compiled"
    assert path.stat().st_mode & 0o777 == 0o700
    assert Path(os.environ["TRITON_CACHE_DIR"]).parent == path


def test_a_second_run_of_a_process_uses_its_own_directory_and_the_choice_of_the_user(clean, tmp_path, monkeypatch):
    for name in ("one", "two"):
        use_compile_cache(str(private(tmp_path / name)))
        for variable in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
            assert Path(os.environ[variable]).is_relative_to(tmp_path / name)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/chosen")
    assert use_compile_cache(str(tmp_path / "one")) == "compiled code: /chosen, by TORCHINDUCTOR_CACHE_DIR"


def test_code_that_others_could_have_changed_is_not_used(clean, tmp_path):
    """Anybody may write to the first directory, so that its content may be a different one tomorrow."""
    public = private(tmp_path / "public")
    public.chmod(0o777)
    use_compile_cache(str(public))
    assert Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).is_relative_to(tmp_path / "home" / "thresher" / "compiled")


def test_without_a_private_directory_the_environment_stays(clean, tmp_path, monkeypatch):
    (tmp_path / "home").chmod(0o777)
    assert use_compile_cache(None).startswith("compiled code: not shared")
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ


def test_a_private_directory_is_one_that_no_other_user_can_change_or_replace(tmp_path):
    inner = private(private(tmp_path / "outer") / "inner")
    assert durable.is_private_directory(inner)
    (tmp_path / "link").symlink_to(inner)
    assert not durable.is_private_directory(tmp_path / "link")
    inner.chmod(0o750)
    assert not durable.is_private_directory(inner)
    inner.chmod(0o700)
    inner.parent.chmod(0o770)
    assert not durable.is_private_directory(inner)
    inner.parent.chmod(0o1777)  # as /tmp: only the owner may rename what is in it
    assert durable.is_private_directory(inner)
    if os.getuid() == 0:
        os.chown(inner, 12345, -1)
        assert not durable.is_private_directory(inner)
