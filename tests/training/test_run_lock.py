"""One run at a time writes into a run directory; the lock of a dead process is taken over."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from tests.support.processes import stop
from tests.support.small_runs import make_base
from thresher import durable
from thresher.errors import UserError
from thresher.training import run_lock
from thresher.training.run_lock import FILE_NAME, lock_run

HOLD = """
import sys, time
from pathlib import Path
from thresher.training.run_lock import lock_run
with lock_run(Path(sys.argv[1])):
    print("locked", flush=True)
    time.sleep(60)
"""


@contextlib.contextmanager
def another_process(directory: Path) -> Iterator[subprocess.Popen]:
    """A process that holds the lock."""
    with subprocess.Popen([sys.executable, "-c", HOLD, str(directory)], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "locked\n"
            yield process
        finally:
            process.kill()


def pretend(path: Path, **changes: str) -> dict[str, str]:
    """Rewrite the holder's description in place, as if another process had written it."""
    record = json.loads(path.read_text()) | changes
    path.write_text(json.dumps(record))
    return record


def left_behind(directory: Path, **changes: str) -> Path:
    """Leave the lock file of a dead process."""
    path = directory / FILE_NAME
    with lock_run(directory):
        record = path.read_text()
    path.write_text(record)
    pretend(path, **changes)
    return path


def test_a_second_process_is_told_who_holds_the_directory_and_takes_over_after_sigkill(tmp_path, caplog):
    caplog.set_level("INFO")
    with another_process(tmp_path) as holder:
        with pytest.raises(UserError) as error, lock_run(tmp_path):
            pass
        assert re.fullmatch(
            rf"{tmp_path} is in use by process {holder.pid} on {socket.gethostname()} \(user .+, started .+ UTC\): "
            r".*python.* Wait until it ends, stop it, or set a different output_dir",
            str(error.value),
            re.DOTALL,
        )
        assert caplog.messages == []
        holder.kill()
        holder.wait()
        with lock_run(tmp_path):
            assert json.loads((tmp_path / FILE_NAME).read_text())["pid"] == str(os.getpid())
    (message,) = caplog.messages
    assert message.startswith(f"taking over {tmp_path} from a process that has died: process {holder.pid} on ")


def test_a_released_lock_leaves_no_file_and_no_message(tmp_path, caplog):
    caplog.set_level("INFO")
    for _ in range(2):
        with lock_run(tmp_path / "new"):
            assert [path.name for path in (tmp_path / "new").iterdir()] == [FILE_NAME]
        assert list((tmp_path / "new").iterdir()) == []
    assert caplog.messages == []


def test_two_runs_of_one_process_exclude_each_other(tmp_path):
    with lock_run(tmp_path), pytest.raises(UserError, match=f"in use by process {os.getpid()} "), lock_run(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


def test_of_many_simultaneous_starts_on_a_stale_lock_one_wins(tmp_path):
    left_behind(tmp_path, pid="1")
    barrier, finish = threading.Barrier(8), threading.Event()
    outcomes: list[str] = []

    def start() -> None:
        barrier.wait()
        try:
            with lock_run(tmp_path):
                outcomes.append("locked")
                finish.wait(30)
        except UserError as error:
            outcomes.append(str(error))

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(outcomes) == 8)
    finish.set()
    for thread in threads:
        thread.join()
    assert outcomes.count("locked") == 1
    assert sum(f"in use by process {os.getpid()} " in outcome for outcome in outcomes) == 7


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


# each of these hides the OS lock of the holder: another host without shared locks, or a file system without locks
def hide_by_host(path: Path, _monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(path, machine="another machine", host="node7")


def hide_by_earlier_boot(path: Path, _monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(path, machine="0")


def hide_by_mount(path: Path, _monkeypatch: pytest.MonkeyPatch) -> None:
    """Two FUSE mounts of a directory on one host are two devices, between which the kernel passes no lock."""
    boot, device = json.loads(path.read_text())["machine"].split()
    pretend(path, machine=f"{boot} {int(device) + 1}")


def hide_by_file_system(_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lock(descriptor: int, *, wait: bool = False) -> bool:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(durable, "lock", lock)


@pytest.mark.parametrize("hide", [hide_by_host, hide_by_earlier_boot, hide_by_mount, hide_by_file_system])
def test_a_heartbeat_protects_a_run_whose_lock_is_not_visible(tmp_path, monkeypatch, hide):
    path = tmp_path / FILE_NAME
    with lock_run(tmp_path, heartbeat_seconds=0.05):
        monkeypatch.setattr(durable, "lock", lambda descriptor, *, wait=False: True)
        hide(path, monkeypatch)
        expected = rf"in use by process .*; if that process does not exist, delete {path}"
        with pytest.raises(UserError, match=expected), lock_run(tmp_path, stale_seconds=30):
            pass
        assert path.exists()


@pytest.mark.parametrize("hide", [hide_by_host, hide_by_earlier_boot, hide_by_mount, hide_by_file_system])
def test_a_lock_without_heartbeats_is_taken_over_after_a_time(tmp_path, monkeypatch, caplog, hide):
    caplog.set_level("INFO")
    path = left_behind(tmp_path)
    hide(path, monkeypatch)
    started = time.monotonic()
    with lock_run(tmp_path, stale_seconds=0.5):
        assert time.monotonic() - started >= 0.4
    assert caplog.messages[0].startswith(f"waiting up to 0 s for a heartbeat of the last holder of {tmp_path}: process")
    assert caplog.messages[1].startswith(f"taking over {tmp_path} from a process that has died: process")


def test_an_old_lock_of_another_host_is_taken_over_at_once(tmp_path, caplog):
    caplog.set_level("INFO")
    path = left_behind(tmp_path, machine="another machine", host="node7")
    os.utime(path, (0, time.time() - 61))
    with lock_run(tmp_path):
        pass
    (message,) = caplog.messages
    assert " on node7 " in message


def test_a_heartbeat_in_the_future_is_waited_for_no_longer_than_one_now(tmp_path, caplog):
    """The clocks of two hosts may differ; here by half a minute."""
    caplog.set_level("INFO")
    path = left_behind(tmp_path, machine="another machine", host="node7")
    os.utime(path, (0, time.time() + 30))
    started = time.monotonic()
    with lock_run(tmp_path, stale_seconds=0.5):
        assert 0.4 <= time.monotonic() - started < 25
    assert caplog.messages[0].startswith(f"waiting up to 0 s for a heartbeat of the last holder of {tmp_path}: process")


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'{"pid": {}}', b"\xff" * 9, b"[" * 9999])
def test_a_damaged_lock_file_is_taken_over_when_it_is_old(tmp_path, content):
    path = tmp_path / FILE_NAME
    path.write_bytes(content)
    os.utime(path, (0, 0))
    with lock_run(tmp_path):
        pass
    assert not path.exists()


def test_a_link_in_place_of_the_lock_file_is_rejected_and_not_written_through(tmp_path):
    target = tmp_path / "target"
    target.write_text("of another owner")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / FILE_NAME).symlink_to(target)
    with pytest.raises(UserError, match="is not a lock file of a run; remove it"), lock_run(tmp_path / "run"):
        pass
    assert target.read_text() == "of another owner"


def test_a_file_system_without_hard_links_has_locks_too(tmp_path, monkeypatch):
    def link(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(run_lock.os, "link", link)
    with lock_run(tmp_path), pytest.raises(UserError, match="in use by"), lock_run(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_run_warns_if_its_lock_file_is_removed(tmp_path, caplog):
    with lock_run(tmp_path, heartbeat_seconds=0.01):
        (tmp_path / FILE_NAME).unlink()
        wait_until(lambda: bool(caplog.messages))
    assert caplog.messages == [
        f"{tmp_path / FILE_NAME} was removed; another run can start in this directory and damage this one"
    ]


def test_the_lock_file_has_no_secret_of_the_command_line(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "orig_argv", ["thresher", "train", "file_name=https://me:hunter2@host/x"])
    with lock_run(tmp_path):
        assert "hunter2" not in (tmp_path / FILE_NAME).read_text()


@pytest.mark.hand  # CI has the same of processes that only take the lock
@pytest.mark.slow
def test_of_two_starts_on_one_output_dir_one_runs_and_a_third_takes_over_after_sigkill(tmp_path):
    config, output = tmp_path / "config.yaml", tmp_path / "output"
    base = make_base(tmp_path) | {"output_dir": str(output), "max_steps": 200, "eval_steps": 100}
    config.write_text(yaml.safe_dump(base))
    command = [sys.executable, "-m", "thresher", "train", str(config)]

    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as first:
        try:
            wait_until(lambda: any((output / "checkpoints").glob("step-*")))
            stop(first.pid)  # it holds the lock, and writes nothing while the second one starts
            before = {path: path.stat().st_mtime_ns for path in output.rglob("*")}
            second = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
            assert second.returncode == 2, second.stderr
            holder = rf"error: {output} is in use by process {first.pid} on {socket.gethostname()} \(user \S+, started "
            assert re.match(holder + r"[^)]+ UTC\): \S+ -m thresher train \S+config.yaml. Wait", second.stderr)
            assert {path: path.stat().st_mtime_ns for path in output.rglob("*")} == before
        finally:
            first.kill()
    third = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert third.returncode == 0, third.stderr
    assert f"taking over {output} from a process that has died: process {first.pid} on " in third.stderr
    assert "resuming from" in third.stderr
    assert (output / "checkpoints" / "step-00000200").is_dir()
    assert not (output / FILE_NAME).exists()


def test_a_file_system_without_locks_is_an_error_that_names_the_mount_option(tmp_path, monkeypatch):
    def no_locks(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))  # as Lustre without the option does

    monkeypatch.setattr(durable.fcntl, "flock", no_locks)
    message = r"has no file locks \(Function not implemented\); mount it .*`-o flock`"
    with pytest.raises(UserError, match=message), lock_run(tmp_path):
        pass
