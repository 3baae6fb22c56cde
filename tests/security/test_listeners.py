"""Open ports of a run that starts its own Ray: per process, and on loopback only; its files are private.

SECURITY.md lists the ports of one such run; the numbers may change with Ray, the addresses may not.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.support.attacks import Run
from tests.support.ports import listening
from tests.support.processes import descendants

LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}


def kind_of(pid: int) -> str:
    """Name a process: Ray's servers by their program, workers by their role, the run itself as the driver."""
    words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").replace("\0", " ").split()
    text = " ".join(words)
    if text.startswith("ray::"):
        return words[0].removeprefix("ray::").partition(".")[0].partition(":")[0]
    for server in ("gcs_server", "raylet", "dashboard_agent", "runtime_env/agent", "log_monitor", "dashboard"):
        if any(server in word for word in words[:6]):
            return server
    return "driver" if "thresher" in text else "other"


def listeners_of(pid: int, open_sockets: dict[str, str]) -> set[tuple[str, int, str]]:
    """(kind, pid, address:port) of all sockets that a process and its descendants listen on."""
    found = set()
    for each in descendants(pid):
        try:
            links = {str(link.readlink()) for link in Path(f"/proc/{each}/fd").iterdir()}
            kind = kind_of(each)
        except OSError:  # the process has just exited
            continue
        found |= {(kind, each, open_sockets[link]) for link in links & open_sockets.keys()}
    return found


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("runtime", ["local", "ray"])
def test_a_run_listens_on_loopback_only_or_not_at_all(finished_run: Run, tmp_path: Path, runtime: str) -> None:
    """With two workers of a Ray cluster that it started, or in one process."""
    session = tempfile.mkdtemp(prefix="ray-")
    token = tmp_path / "token"
    token.write_text(secrets.token_hex(32))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY")}
    environment |= {"RAY_TMPDIR": session, "RAY_AUTH_TOKEN_PATH": str(token)}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    on_ray = {"runtime": "ray", "actor_train": {"num_workers": 2}}
    config = finished_run.config(
        output_dir=str(tmp_path / "output"), max_steps=20, **(on_ray if runtime == "ray" else {})
    )
    command = [sys.executable, "-m", "thresher", "train", str(config)]
    seen: set[tuple[str, int, str]] = set()
    modes: set[int] = set()  # of what Ray's files are in
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as run:
        while run.poll() is None:
            seen |= listeners_of(run.pid, listening())
            with contextlib.suppress(FileNotFoundError):  # the run removes it when it ends
                modes |= {stat.S_IMODE(directory.stat().st_mode) for directory in Path(session).iterdir()}
            time.sleep(1)
        printed = run.stdout.read().decode() if run.stdout else ""
    shutil.rmtree(session)
    assert run.returncode == 0, printed
    counts = Counter((kind, pid) for kind, pid, _ in seen)
    for (kind, _), count in sorted(counts.items()):
        print(f"{kind}: {count}")
    if runtime == "local":
        assert (seen, modes) == (set(), set())
        return
    assert modes == {0o700}
    assert {"driver", "raylet", "gcs_server", "ActorWorker"} <= {kind for kind, _ in counts}
    assert {address.partition(":")[0] for _, _, address in seen} <= LOOPBACK, counts
