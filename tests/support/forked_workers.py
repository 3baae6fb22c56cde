"""Ray workers that are forked from a process that has imported their code, instead of started anew.

A new worker imports Ray twice, then torch, transformers and thresher: ten seconds of a core, more than most tests on
Ray need for everything else. A raylet starts a worker with the program that the setting `setup_worker_path` names. This
file is such a program: it passes the command, the environment and the open files of the worker to the fork server.

Forked workers differ from started ones in two ways: all have the same seed for the hashes of strings, and libraries
other than Ray have read the environment of the fork server when they were imported. `thresher train` and `ray start`
start their workers, also in tests.
"""

from __future__ import annotations

import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

SOCKET_VARIABLE = "THRESHER_TESTS_FORK_SERVER"
# what a worker imports until the end of a run, but not Ray: it reads the environment of a worker when it is imported
PRELOADED = (
    "thresher.runtime.rank",
    "pandas",
    "pyarrow.compute",
    "transformers.models.llama.modeling_llama",
    "jsonschema",
    "requests",
)


@contextmanager
def fork_server() -> Iterator[str]:
    """Start a process that forks workers; yield the program that asks it for one.

    The environment names its socket until the end, for the nodes of Ray that are started meanwhile.
    """
    with TemporaryDirectory(prefix="forks-") as directory:  # short, as the path of a socket must be
        path = str(Path(directory) / "socket")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen(128)  # requests wait here while the server imports
            number = listener.fileno()
            # the server ends when its stdin is closed, so with this process at the latest
            server = subprocess.Popen(
                [sys.executable, "-m", __name__, str(number)], stdin=subprocess.PIPE, pass_fds=[number]
            )
        os.environ[SOCKET_VARIABLE] = path
        try:
            yield __file__
        finally:
            del os.environ[SOCKET_VARIABLE]
            server.communicate()


def ask_for_worker(arguments: list[str]) -> None:
    """Pass a command of a raylet to the fork server, with the variables of its runtime environment."""
    parser = ArgumentParser(allow_abbrev=False)  # the options of Ray's setup_worker.py
    parser.add_argument("--serialized-runtime-env-context", default="{}", type=json.loads)
    parser.add_argument("--language")
    options, command = parser.parse_known_args(arguments)
    context = options.serialized_runtime_env_context
    if options.language != "PYTHON" or context.get("command_prefix"):
        raise NotImplementedError(f"only plain Python workers can be forked, not {options}")
    environment = os.environ | context.get("env_vars", {})
    request = {"command": command, "environment": environment, "directory": str(Path.cwd())}
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(os.environ[SOCKET_VARIABLE])
        socket.send_fds(client, [b"\n"], [0, 1, 2])
        client.sendall(json.dumps(request).encode())


def serve(listener: socket.socket) -> list[str]:
    """Fork a worker for each request until stdin is closed; in the workers, return their command."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # so that no worker remains as a zombie
    while True:
        ready, _, _ = select.select([listener, sys.stdin], [], [])
        if sys.stdin in ready:
            sys.exit()
        import_code()
        connection, _ = listener.accept()
        with connection:
            _, files, _, _ = socket.recv_fds(connection, 1, 3)
            with connection.makefile() as stream:
                request = json.load(stream)
        if os.fork() == 0:
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setpgrp()  # a signal to the group of a worker must not reach the server and the tests
            for number, file in enumerate(files):
                os.dup2(file, number)
            os.closerange(3, max(files) + 1)
            os.environ.clear()
            os.environ.update(request["environment"])
            os.chdir(request["directory"])
            return list(request["command"])
        for file in files:
            os.close(file)


@functools.cache
def import_code() -> None:
    """Import the code of workers; at the first request, so that it does not delay the start of Ray."""
    for name in PRELOADED:
        importlib.import_module(name)
    gc.freeze()  # collections in workers would copy the pages that all of them share


if __name__ == "__main__":
    if len(sys.argv) > 2:
        ask_for_worker(sys.argv[1:])
    else:
        sys.argv = serve(socket.socket(fileno=int(sys.argv[1])))
        runpy.run_path(sys.argv[0], run_name="__main__")
