"""Workers that are forked from a process with their code, so that a restart does not wait for imports.

`ForkServers` keeps one such process, a fork server, per node and environment. This file is its program, too, and the
program that Ray starts as the Python of a worker: it asks the server for a process, and becomes a new Python if there
is none. Ray is not imported before a fork, as it reads the environment of its worker when it is imported. A server that
has opened a GPU ends before it forks: CUDA does not survive a fork.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# a server forks within milliseconds; a busy machine needs longer, a stopped server is not waited for
_SECONDS_TO_FORK = 20.0
_SECONDS_TO_ANSWER = 2.0
# whose modules a server imports, as far as a running worker has them; Ray needs the last ones
_PACKAGES = {
    "thresher",
    "torch",
    "transformers",
    "peft",
    "google",
    "jsonschema",
    "psutil",
    "requests",
    "wcwidth",
    "yaml",
}
_RAY = "thresher.runtime.ray"
_GPUS = ("/dev/nvidia", "/dev/dri", "/dev/kfd")
# parts of a job's runtime environment that choose the Python of workers themselves
_OTHER_PYTHON = ("py_executable", "pip", "uv", "conda", "container", "image_uri", "nsight", "rocprof_sys")


def imported_modules() -> list[str]:
    """Name the modules of this worker that a fork server may import."""
    return [name for name in list(sys.modules) if name.partition(".")[0] in _PACKAGES and not name.startswith(_RAY)]


class ForkServers:
    """The fork servers of a run, which end with its connection to Ray."""

    def __init__(self) -> None:
        self._keepers: dict[tuple[str, frozenset[tuple[str, str]]], Any] = {}

    def start(self, nodes: Sequence[str], environment: Mapping[str, str], modules: Any) -> None:
        """Start the missing servers of some nodes in the background. modules: their names, or a ref to them."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        if any(ray.get_runtime_context().runtime_env.get(name) for name in _OTHER_PYTHON):
            return
        for node in nodes:
            key = (node, frozenset(environment.items()))
            if key in self._keepers:
                continue
            # not lowered in priority, which its forks would inherit besides their own
            variables = {**environment, "RAY_worker_niceness": "0"}
            keeper = ray.remote(_Keeper).options(
                num_cpus=0,
                runtime_env={"env_vars": variables},
                scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
            )
            self._keepers[key] = keeper.remote(modules)

    def find(self, nodes: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
        """Return the command that starts a worker's Python from the server of each node that has one ready."""
        import ray
        from ray.exceptions import RayError

        keys = {node: (node, frozenset(environment.items())) for node in nodes}
        asked = {self._keepers[key].command.remote(): node for node, key in keys.items() if key in self._keepers}
        found: dict[str, str] = {}
        # servers that still start, or whose node is lost, do not answer
        for reply in ray.wait(list(asked), num_returns=len(asked), timeout=_SECONDS_TO_ANSWER)[0] if asked else ():
            node = asked[reply]
            try:
                if command := ray.get(reply):
                    found[node] = command
            except RayError:  # the next start of servers replaces it
                ray.kill(self._keepers.pop(keys[node]))
        return found


class _Keeper:
    """An actor that starts the fork server of a node, and ends with it."""

    def __init__(self, modules: Sequence[str]):
        # for this user alone, like every directory of mkdtemp; short, as the path of a socket must be
        self._directory = tempfile.TemporaryDirectory(prefix="thresher-fork-")
        self._socket = str(Path(self._directory.name) / "socket")
        # its stdin is closed when this process ends, however it ends
        self._server = subprocess.Popen(
            [sys.executable, "-P", __file__, "serve", self._socket],
            stdin=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        assert self._server.stdin is not None  # noqa: S101  # a pipe
        self._server.stdin.write(json.dumps(list(modules)).encode() + b"\n")
        self._server.stdin.flush()

    def command(self) -> str | None:
        """Return the command of a worker's Python; None while the server imports."""
        if self._server.poll() is not None:
            raise RuntimeError(f"the fork server has ended with {self._server.returncode}")
        is_ready = Path(self._socket).exists()
        return shlex.join([sys.executable, "-I", "-S", __file__, "worker", self._socket]) if is_ready else None


def become_worker(path: str, command: list[str]) -> None:
    """Let the server fork a process that runs `python COMMAND`; without its answer, become a new Python that does."""
    request = {"command": command, "environment": dict(os.environ), "directory": str(Path.cwd())}
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as client:
        client.settimeout(_SECONDS_TO_FORK)
        client.connect(path)
        socket.send_fds(client, [b"\n"], [0, 1, 2])
        client.sendall(json.dumps(request).encode() + b"\n")
        if client.recv(1):  # the process exists, and begins if this one still waits for it
            client.sendall(b"\n")
            return
    os.execv(sys.executable, [sys.executable, *command])  # noqa: S606


def serve(path: str) -> list[str]:
    """Import the modules that stdin names, then fork until it is closed; in a fork, return its command."""
    names = json.loads(sys.stdin.readline())
    for name in names:
        with contextlib.suppress(Exception):  # the worker imports it, or fails in it, as without a server
            importlib.import_module(name)
    if _has_opened_gpu():
        _remove_directory(path)
        sys.exit("a module has opened the GPU when it was imported: workers are started, not forked")
    gc.freeze()  # a collection in a fork would copy the pages that all of them share
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel removes forks that have ended
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(1024)
        while True:
            readable, _, _ = select.select([listener, sys.stdin], [], [])
            if sys.stdin in readable:
                _remove_directory(path)
                sys.exit()
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError, ValueError):  # the client has ended
                connection.settimeout(_SECONDS_TO_FORK)
                _, files, _, _ = socket.recv_fds(connection, 1, 3)
                with connection.makefile() as stream:
                    request = json.loads(stream.readline())
                if os.fork() == 0:
                    listener.close()
                    return _begin(connection, request, files)
                for file in files:
                    os.close(file)


def _remove_directory(path: str) -> None:
    """Remove the socket and its directory, which a keeper that was killed has left."""
    with contextlib.suppress(OSError):
        Path(path).unlink(missing_ok=True)
        Path(path).parent.rmdir()


def _begin(connection: socket.socket, request: dict[str, Any], files: Sequence[int]) -> list[str]:
    """Make a forked process what its request describes; return its command."""
    try:
        connection.sendall(b"\n")
        if not connection.recv(1):  # the program has become a new Python meanwhile
            os._exit(0)
        connection.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setpgrp()
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["directory"])
    except BaseException:  # never a second server
        os._exit(1)
    sys.path.insert(0, str(Path(request["command"][0]).parent))
    return list(request["command"])


def _has_opened_gpu() -> bool:
    opened = []
    for file in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            opened.append(str(file.readlink()))
    return any(path.startswith(_GPUS) for path in opened)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["worker", path, *command]:
            become_worker(path, command)
        case ["serve", path]:
            sys.argv = serve(path)
            runpy.run_path(sys.argv[0], run_name="__main__")
