"""Processes that stay: a real gloo group on this machine which runs one function after another on every rank.

Importing torch and transformers takes longer than most cases do, so that ranks are forked from one process that has
imported them, and serve all cases of a test session.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

_SECONDS_FOR_A_CASE = 300


class RankPool:
    """`size` processes; `run` calls a function on all of them and returns what each returned."""

    def __init__(self, size: int):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "transformers", "peft"])
        self._pipes: list[Connection] = []
        self._processes = []
        port = _free_port()
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, size, port, sys.path), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        for pipe in self._pipes:
            pipe.send((function, args))
        answers = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(_SECONDS_FOR_A_CASE):
                self.close()
                raise TimeoutError(f"rank {rank} did not answer within {_SECONDS_FOR_A_CASE} s")
            answers.append(pipe.recv())
        failures = [f"rank {rank}: {text}" for rank, (is_sound, text) in enumerate(answers) if not is_sound]
        if failures:
            raise AssertionError("\n".join(failures))
        return [value for _, value in answers]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()


def _serve(pipe: Connection, rank: int, size: int, port: int, path: list[str]) -> None:
    sys.path[:] = path
    os.environ.update(GLOO_SOCKET_IFNAME="lo", HF_HUB_OFFLINE="1")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, size, is_master=rank == 0, timeout=timedelta(seconds=60))
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=_SECONDS_FOR_A_CASE)
    )
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, function(*args)))
        except BaseException:  # told to the test
            pipe.send((False, traceback.format_exc()))


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
