"""Workers that are forked from a process with their code: what they get, and what happens without such a process."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.compared_runs import merge, metric_log
from tests.support.processes import descendants
from tests.support.ray_fixtures import FEW_PROCESSES, connection, ray_node
from tests.support.small_runs import last_weights
from tests.support.worker_killer import Killer, workers_named
from thresher.config import parse_config
from thresher.config.roles import PolicyConfig
from thresher.pipeline import DPOPipeline
from thresher.runtime.ray import fork_server

PROGRAM = fork_server.__file__
SECONDS = 120.0
REPORT = """
import json, os, sys
found = {"parent": os.getppid(), "directory": os.getcwd(), "variable": os.environ.get("OF_WORKER"),
         "arguments": sys.argv[1:], "has_code": "decimal" in sys.modules, "name": __name__}
print(json.dumps(found), flush=True)
"""


def wait_until(reached: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + SECONDS
    while not (found := reached()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


@pytest.fixture
def serve(tmp_path) -> Iterator[Callable[..., tuple[subprocess.Popen[bytes], Path]]]:
    started: list[subprocess.Popen[bytes]] = []

    def start(*modules: str) -> tuple[subprocess.Popen[bytes], Path]:
        path = tmp_path / f"server-{len(started)}" / "socket"
        path.parent.mkdir()
        environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
        command = [sys.executable, "-P", PROGRAM, "serve", str(path)]
        started.append(subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, stderr=subprocess.PIPE))
        assert started[-1].stdin is not None
        started[-1].stdin.write(json.dumps(modules).encode() + b"\n")
        started[-1].stdin.flush()
        wait_until(lambda: path.exists() or started[-1].poll() is not None)
        return started[-1], path

    yield start
    for each in started:
        each.kill()
        each.wait()


def become(path: Path, script: Path, **more: Any) -> subprocess.Popen[str]:
    """Start a worker's Python as Ray does."""
    command = [sys.executable, "-I", "-S", PROGRAM, "worker", str(path), str(script), "one", "two"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **more)


@pytest.fixture
def script(tmp_path) -> Path:
    path = tmp_path / "worker.py"
    path.write_text(REPORT)
    return path


def test_a_forked_worker_has_the_code_of_the_server_and_its_own_environment(serve, script, tmp_path):
    server, path = serve("decimal", "no_such_module")
    for value in ("first", "second"):
        worker = become(path, script, env={**os.environ, "OF_WORKER": value}, cwd=tmp_path)
        found = json.loads(worker.communicate(timeout=SECONDS)[0])
        assert found == {
            "parent": server.pid,
            "directory": str(tmp_path),
            "variable": value,
            "arguments": ["one", "two"],
            "has_code": True,
            "name": "__main__",
        }
    server.communicate(timeout=SECONDS)  # closes its stdin, as the end of the process that keeps it does
    assert server.returncode == 0
    assert not path.parent.exists()


def test_without_a_server_a_worker_is_a_new_python(serve, script, tmp_path):
    worker = become(tmp_path / "none", script)
    found = json.loads(worker.communicate(timeout=SECONDS)[0])
    assert found["parent"] == os.getpid()
    assert found["arguments"] == ["one", "two"]
    server, path = serve("decimal")
    server.kill()
    server.wait()
    found = json.loads(become(path, script).communicate(timeout=SECONDS)[0])
    assert not found["has_code"]


def test_a_server_that_answers_too_late_starts_no_second_worker(serve, script):
    server, path = serve("decimal")
    server.send_signal(signal.SIGSTOP)
    code = f"import runpy; f = runpy.run_path({PROGRAM!r}); f['become_worker'].__globals__['_SECONDS_TO_FORK'] = 0.5; "
    code += f"f['become_worker']({str(path)!r}, [{str(script)!r}])"
    worker = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    first = json.loads(worker.stdout.readline())
    assert first["parent"] == os.getpid()
    server.send_signal(signal.SIGCONT)
    assert worker.stdout.read() == ""  # until the fork has ended, too, which has the same stdout
    assert worker.wait(timeout=SECONDS) == 0
    found = json.loads(become(path, script).communicate(timeout=SECONDS)[0])
    assert found["parent"] == server.pid  # it serves the next one


def test_a_server_that_has_opened_a_gpu_ends(serve, script, tmp_path):
    """A file in place of a GPU, which this machine may not have."""
    (tmp_path / "opens_gpu.py").write_text(
        f"import sys\nsys.modules['__main__']._GPUS = ({str(tmp_path)!r},)\nfile = open({str(script)!r})\n"
    )
    server, path = serve("opens_gpu")
    assert b"opened the GPU" in server.communicate(timeout=SECONDS)[1]
    assert server.returncode == 1
    assert not path.parent.exists()


def sockets_of_servers() -> list[Path]:
    """Return the sockets of the fork servers that are ready, below this process."""
    found = []
    for pid in descendants(os.getpid()):
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
            if command[-3:-2] == ["serve"] and Path(command[-2]).exists():
                found.append(Path(command[-2]))
    return found


class PreparedKiller(Killer):
    """Kills a worker once a fork server is ready."""

    def log(self, step: int, metrics: object) -> None:
        if step == self._step and not self.killed:
            wait_until(sockets_of_servers)
        super().log(step, metrics)


@pytest.mark.hand  # CI forks light workers, and recovers by workers that are forked by the tests' own server
@pytest.mark.distributed
def test_a_killed_run_ends_bitwise_on_forked_workers_and_leaves_no_process(base, tmp_path, monkeypatch):
    from thresher.runtime.ray import runtime

    monkeypatch.setattr(runtime, "_SECONDS_BEFORE_FORKS", 0.0)
    own = {"runtime": "ray", "actor_train": {"num_workers": 2}, "save_steps": 2, "async_save": False}
    values = merge(base, {**own, "track_with": ["console"]})
    DPOPipeline(parse_config({**values, "output_dir": str(tmp_path / "uninterrupted")})).run()
    killer = PreparedKiller(3, "ActorWorker")
    DPOPipeline(parse_config({**values, "output_dir": str(tmp_path / "killed")}), console=killer).run()
    assert killer.killed
    (line,) = (tmp_path / "killed/logs/recoveries.jsonl").read_text().splitlines()
    assert json.loads(line)["from_step"] == 2
    assert metric_log(tmp_path / "killed") == metric_log(tmp_path / "uninterrupted")
    ours, theirs = last_weights(tmp_path / "killed"), last_weights(tmp_path / "uninterrupted")
    assert all(torch.equal(ours[name], weight) for name, weight in theirs.items())
    wait_until(lambda: not sockets_of_servers() and not workers_named("ActorWorker"))


class ReportingWorker:
    """A worker that says who started it."""

    def __init__(self, rank: int, size: int, threads: int, directory: str):  # noqa: ARG002
        self.rank = rank

    def origin(self) -> dict[str, Any]:
        import ray

        gpus = ray.get_runtime_context().get_accelerator_ids()["GPU"]
        return {"parent": os.getppid(), "gpus": gpus}

    def variable(self) -> str | None:
        return os.environ.get("OF_ROLE")


@pytest.mark.distributed
def test_ray_forks_workers_on_their_devices_from_a_server_that_reserves_none():
    with ray_node(num_cpus=2, num_gpus=2, **FEW_PROCESSES) as address, connection(address):
        import ray

        from thresher.runtime.ray.cluster import Cluster, ResourceManager

        forks, environment = fork_server.ForkServers(), {"OF_ROLE": "policy"}
        resources = ResourceManager({"actor_train": PolicyConfig(device_mapping=[0, 1])}, None, concurrent=True)
        node = resources.placements["actor_train"][0].node.node_id
        wait_until(lambda: not {"CPU", "GPU"} & ray.available_resources().keys())  # the run has reserved all of them
        forks.start([node], environment, ["decimal"])
        wait_until(lambda: forks.find([node], environment))
        cluster = Cluster("actor_train", ReportingWorker, resources, environment, forks=forks)
        found = cluster.call("origin")
        (server,) = {each["parent"] for each in found}
        assert [each["gpus"] for each in found] == [["0"], ["1"]]
        assert cluster.call("variable") == ["policy", "policy"]
        cluster.close()
        other = Cluster("actor_train", ReportingWorker, resources, {"OF_ROLE": "reference"}, forks=forks)
        assert server not in [each["parent"] for each in other.call("origin")]  # libraries have read its environment
        other.close()
        resources.close()
