"""Python programs that are forked from a process that has imported their code, instead of started anew.

A new process of `thresher` or a new Ray worker imports torch, transformers and thresher: six to ten seconds of a core,
more than most tests need for everything else. This file is a small program that passes its command, environment,
directory and open files to a server, which forks the process:

- `python()` begins a command in place of `sys.executable`. Signals reach the program, also SIGKILL, but not SIGSTOP;
  its process id is another one.
- `WORKER_PROGRAM` is what the setting `setup_worker_path` of a Ray node names, while a server runs.

Forked processes differ from started ones in two ways: all have the same seed for the hashes of strings, and libraries
other than Ray have read the environment of the server when they were imported. Tests of what a program imports, and
some of every kind of run, start their processes.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

WORKER_PROGRAM = __file__
ROOT = Path(__file__).parents[2]  # not that of paths.py: as a program, this file imports nothing of the tests
SOCKET_VARIABLE = "THRESHER_TESTS_FORK_SERVER"
# what workers and commands import until the end of a run, but not Ray: it reads the environment when it is imported
PRELOADED = (
    "thresher.runtime.rank",
    "thresher.pipeline",
    "thresher.cli",
    "pandas",
    "pyarrow.compute",
    "transformers.models.llama.modeling_llama",
    "jsonschema",
    "requests",
)
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


@contextmanager
def fork_server() -> Iterator[list[str]]:
    """Start a process that forks others; yield what begins a command instead of `sys.executable`.

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
                [sys.executable, "-m", __name__, "serve", str(number)],
                stdin=subprocess.PIPE,
                pass_fds=[number],
                cwd=ROOT,
            )
        earlier = os.environ.get(SOCKET_VARIABLE)
        os.environ[SOCKET_VARIABLE] = path
        try:
            yield [sys.executable, "-I", "-S", __file__, "python", path]
        finally:
            os.environ.pop(SOCKET_VARIABLE)
            if earlier is not None:
                os.environ[SOCKET_VARIABLE] = earlier
            server.communicate()


@functools.cache
def python() -> list[str]:
    """The beginning of a command that is forked from a server of this process, started on first use."""
    stack = ExitStack()
    atexit.register(stack.close)
    return stack.enter_context(fork_server())


def ask(path: str, arguments: list[str], environment: dict[str, str], *, waits: bool) -> socket.socket:
    """Ask the server for a process that runs `python ARGUMENTS` with the files, the directory and the environment."""
    request = {"arguments": arguments, "environment": environment, "directory": os.getcwd(), "waits": waits}  # noqa: PTH109
    client = socket.socket(socket.AF_UNIX)
    client.connect(path)
    socket.send_fds(client, [b"\n"], [0, 1, 2])
    client.sendall(json.dumps(request).encode() + b"\n")
    return client


def run_as_python(path: str, arguments: list[str]) -> None:
    """Act as `python ARGUMENTS`: forward signals, and end as the forked process ends."""
    client = ask(path, arguments, dict(os.environ), waits=True)
    process = int(client.recv(32))
    for number in _FORWARDED:
        signal.signal(number, lambda received, _: os.kill(process, received))
    code = os.waitstatus_to_exitcode(int(client.recv(32) or b"256"))
    if code < 0:
        if code != -signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


def start_worker(arguments: list[str]) -> None:
    """Pass the command of a raylet to the server, with the variables of its runtime environment."""
    from argparse import ArgumentParser

    parser = ArgumentParser(allow_abbrev=False)  # the options of Ray's setup_worker.py
    parser.add_argument("--serialized-runtime-env-context", default="{}", type=json.loads)
    parser.add_argument("--language")
    options, command = parser.parse_known_args(arguments)
    context = options.serialized_runtime_env_context
    if options.language != "PYTHON" or context.get("command_prefix"):
        raise NotImplementedError(f"only plain Python workers can be forked, not {options}")
    ask(os.environ[SOCKET_VARIABLE], command, os.environ | context.get("env_vars", {}), waits=False).close()


def serve(listener: socket.socket) -> list[str]:
    """Fork a process for each request until stdin is closed; in the processes, return their arguments."""
    events = selectors.DefaultSelector()
    events.register(listener, selectors.EVENT_READ)
    events.register(sys.stdin, selectors.EVENT_READ)
    while True:
        for key, _ in events.select():
            if key.fileobj is sys.stdin:
                sys.exit()
            elif key.fileobj is listener:
                import_code()
                connection, _ = listener.accept()
                _, files, _, _ = socket.recv_fds(connection, 1, 3)
                with connection.makefile() as stream:
                    request = json.loads(stream.readline())
                process = os.fork()
                if process == 0:
                    connection.close()
                    for other in events.get_map().values():
                        if isinstance(other.fileobj, int):
                            os.close(other.fileobj)
                        elif other.fileobj is not sys.stdin:
                            other.fileobj.close()
                    events.close()
                    become(request, files)
                    return list(request["arguments"])
                for file in files:
                    os.close(file)
                events.register(os.pidfd_open(process), selectors.EVENT_READ, (process, connection))
                if request["waits"]:
                    connection.send(str(process).encode())
                    events.register(connection, selectors.EVENT_READ, (process, connection))
            elif isinstance(key.fileobj, int):  # a process has ended
                process, connection = key.data
                events.unregister(key.fileobj)
                os.close(key.fileobj)
                _, status = os.waitpid(process, 0)
                if connection in events.get_map():  # a program still waits for it
                    events.unregister(connection)
                    connection.send(str(status).encode())
                connection.close()
            elif key.fileobj.fileno() >= 0:  # the program that waits for a process has been killed
                events.unregister(key.fileobj)
                os.kill(key.data[0], signal.SIGKILL)


def become(request: dict[str, object], files: list[int]) -> None:
    """Make a forked process what the request describes."""
    os.setpgrp()  # a signal to the group of a program must not reach the server and the tests
    for number, file in enumerate(files):
        os.dup2(file, number)
    os.closerange(3, max(files) + 1)
    os.environ.clear()
    os.environ.update(request["environment"])  # type: ignore[call-overload]
    os.chdir(str(request["directory"]))
    sys.path[:0] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]


def run(arguments: list[str]) -> None:
    """Do what `python ARGUMENTS` does."""
    if arguments[0] == "-m":
        sys.path.insert(0, os.getcwd())  # noqa: PTH109
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    elif arguments[0] == "-c":
        sys.path.insert(0, "")
        sys.argv = ["-c", *arguments[2:]]
        exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})  # noqa: S102
    else:
        sys.path.insert(0, str(Path(arguments[0]).parent))
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")


@functools.cache
def import_code() -> None:
    """Import the code of programs; at the first request, so that it does not delay the start of Ray."""
    for name in PRELOADED:
        importlib.import_module(name)
    gc.freeze()  # collections in forked processes would copy the pages that all of them share


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["serve", number]:
            run(serve(socket.socket(fileno=int(number))))
        case ["python", path, *arguments]:
            run_as_python(path, arguments)
        case arguments:
            start_worker(arguments)
