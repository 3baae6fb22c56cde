"""What Ray that a run started leaves on the disk: nothing after success, its logs after a failure, a private token."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import ray

from thresher.errors import ResourceError
from thresher.runtime.ray.session import protect_token, ray_session

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

LOST_RAYLET = """
import os, signal
from thresher.errors import WorkerLostError
from thresher.runtime.ray.environment import set_environment
set_environment(None)
import ray
from thresher.runtime.ray.session import RaySession

with RaySession(None) as session:
    for lost in ("process", "node", None):
        try:
            with session.attempt():
                print("node", ray.get_runtime_context().get_node_id())
                if lost == "node":
                    (raylet,) = ray._private.worker._global_node.all_processes["raylet"]
                    os.kill(raylet.process.pid, signal.SIGKILL)
                    raylet.process.wait()
                if lost:
                    raise WorkerLostError(lost)
        except WorkerLostError:
            pass
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


@pytest.fixture
def starts(home, monkeypatch) -> list[str | None]:
    """What happens to each start of Ray, the next one first: an error's text, or None if it succeeds."""
    left: list[str | None] = []

    def init(*, _temp_dir: str, **_: object) -> None:
        (Path(_temp_dir) / "logs").mkdir(parents=True, exist_ok=True)
        if (error := left.pop(0)) is not None:
            raise Exception(error)  # as Ray raises it

    monkeypatch.setenv("RAY_TMPDIR", str(home))
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setattr(ray, "nodes", lambda: [{"NodeManagerAddress": "127.0.0.1", "MetricsExportPort": 1}])
    return left


TIMED_OUT = "The current node timed out during startup. This could happen because some of the raylet failed to startup."


def test_a_start_of_ray_that_timed_out_is_tried_once_more(starts, caplog):
    starts[:] = [TIMED_OUT, None]
    with ray_session(None):
        assert starts == []
    assert caplog.messages == ["Ray did not start in time; trying once more"]


def test_ray_that_does_not_start_in_time_twice_is_an_error_that_names_its_logs(starts, home):
    starts[:] = [TIMED_OUT, TIMED_OUT, None]
    with (
        pytest.raises(ResourceError, match="did not start in time on this machine, twice") as raised,
        ray_session(None),
    ):
        pass
    assert starts == [None]
    (kept,) = home.glob("thresher-*")
    assert f"see {kept}," in str(raised.value)
    assert (kept / "ray" / "logs").is_dir()
    assert mode_of(kept) == 0o700


def test_another_error_of_a_start_is_not_tried_again_and_leaves_nothing(starts, home):
    starts[:] = ["of something else", None]
    with pytest.raises(Exception, match="of something else"), ray_session(None):
        pass
    assert starts == [None]
    assert not list(home.glob("thresher-*"))


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


@pytest.mark.distributed
def test_a_session_survives_a_lost_worker_and_is_replaced_if_its_own_node_is_lost(home):
    with tempfile.TemporaryDirectory(prefix="ray-") as temporary:
        environment = os.environ | {"RAY_TMPDIR": temporary}
        result = subprocess.run(
            [sys.executable, "-c", LOST_RAYLET],
            env=environment,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
    assert result.returncode == 0, result.stderr
    first, after_a_worker, after_its_node = re.findall("^node (.+)$", result.stdout, re.MULTILINE)  # Ray prints, too
    assert first == after_a_worker != after_its_node
