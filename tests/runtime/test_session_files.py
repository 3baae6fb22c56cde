"""What Ray that a run started leaves on the disk: nothing after success, its logs after a failure, a private token."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from thresher.runtime.ray.session import protect_token

SESSIONS = """
from thresher.errors import RunStopped
from thresher.runtime.ray.environment import set_environment
set_environment(None)
import ray
from thresher.runtime.ray.session import ray_session

for error in (None, RunStopped(3), RuntimeError("of a worker")):
    try:
        with ray_session(None):
            print(ray._private.worker._global_node.get_session_dir_path())
            if error is not None:
                raise error
    except (RunStopped, RuntimeError) as raised:
        assert raised is error
"""


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_the_token_is_readable_for_its_owner_alone(home):
    protect_token()
    token = home / ".ray" / "auth_token"
    assert mode_of(token) == 0o600
    assert len(token.read_text()) == 64
    assert [path.name for path in token.parent.iterdir()] == ["auth_token"]
    content = token.read_text()
    protect_token()
    assert token.read_text() == content


def test_a_token_that_ray_made_readable_for_all_is_restricted_and_kept(home):
    token = home / ".ray" / "auth_token"
    token.parent.mkdir()
    token.write_text("of an earlier version")
    token.chmod(0o644)
    protect_token()
    assert (mode_of(token), token.read_text()) == (0o600, "of an earlier version")


@pytest.mark.parametrize("name", ["RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"])
def test_no_token_is_made_if_the_environment_names_one(home, monkeypatch, name):
    monkeypatch.setenv(name, "elsewhere")
    protect_token()
    assert list(home.iterdir()) == []


def test_a_home_that_cannot_be_written_is_left_to_ray(home, monkeypatch):
    monkeypatch.setenv("HOME", str(home / "absent"))
    protect_token()
    assert list(home.iterdir()) == []


@pytest.mark.hand  # CI has the files of the token
@pytest.mark.slow
@pytest.mark.distributed
def test_ray_leaves_its_session_after_a_failure_only(home):
    with tempfile.TemporaryDirectory(prefix="ray-") as temporary:  # the path of a socket has at most 107 bytes
        environment = os.environ | {"RAY_TMPDIR": temporary}
        result = subprocess.run(
            [sys.executable, "-c", SESSIONS], env=environment, capture_output=True, text=True, timeout=240, check=False
        )
        assert result.returncode == 0, result.stderr
        failed = Path(result.stdout.split()[-1])
        assert any((failed / "logs").iterdir())
        (private,) = Path(temporary).iterdir()  # those of the two sessions without a failure are gone
        assert private in failed.parents
        assert mode_of(private) == 0o700
    assert mode_of(home / ".ray" / "auth_token") == 0o600
