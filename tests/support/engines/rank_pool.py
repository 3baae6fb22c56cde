"""Pools of processes in a gloo group on this machine that run functions on every rank.

Importing what a case needs takes longer than most cases, so ranks are forked from one process that has imported it, and
run the cases of many test files.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

_SECONDS_FOR_A_CASE = 300
_SECONDS_AFTER_A_FAILURE = 20
# idle gloo groups have threads that wake a hundred times per second
_MAX_THREADS = 150
_PRELOADED = ["peft", "tests.support.engines.config_runs", "tests.support.engines.parity"]
_FREEZE = "tests.support.freeze"
_PRELOADED_OF_ENGINES = {"megatron": ["thresher.engines.megatron.build"]}


class RankPool:
    """`size` processes; `run` calls a function on all of them and returns the results by rank.

    engine: what its ranks import before the fork, if it is the first pool of its process. seconds: how long a case, and
    a collective in it, may take.
    """

    def __init__(self, size: int, engine: str = "native", seconds: int = _SECONDS_FOR_A_CASE):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([*_PRELOADED, *_PRELOADED_OF_ENGINES.get(engine, ()), _FREEZE])
        self._seconds = seconds
        self._pipes: list[Connection] = []
        self._processes = []
        # handed over open: another process could take a port that is free for a moment
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = int(listener.getsockname()[1])
            for rank in range(size):
                ours, theirs = context.Pipe()
                arguments = (theirs, rank, size, port, listener if rank == 0 else None, seconds)
                process = context.Process(target=_serve, args=arguments, daemon=True)
                process.start()
                self._pipes.append(ours)
                self._processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        for pipe in self._pipes:
            pipe.send((function, args))
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        answers: dict[int, Any] = {}
        failures: list[str] = []
        while waiting:
            # after a failure the other ranks may wait for the failed one
            ready = wait(list(waiting), _SECONDS_AFTER_A_FAILURE if failures else self._seconds)
            if not ready:
                failures += [f"rank {rank}: no answer" for rank in waiting.values()]
                self.close()
                break
            for pipe in ready:
                rank = waiting.pop(pipe)
                succeeded, answers[rank] = pipe.recv()
                if not succeeded:
                    failures.append(f"rank {rank}: {answers[rank]}")
        if failures:
            raise AssertionError("\n".join(failures))
        return [answers[rank] for rank in range(len(self._pipes))]

    @property
    def is_alive(self) -> bool:
        return all(process.is_alive() for process in self._processes)

    @property
    def num_threads(self) -> int:
        """Threads of the first rank; the others have as many."""
        return len(list(Path(f"/proc/{self._processes[0].pid}/task").iterdir()))

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()


class RankPools:
    """Pools by number of ranks, started on first use.

    One engine at a time, because Megatron-Core and DeepSpeed change the state of their process. A dead pool or one with
    too many threads is replaced.
    """

    def __init__(self) -> None:
        self._engine = ""
        self._pools: dict[int, RankPool] = {}

    def find(self, size: int, engine: str) -> RankPool:
        if engine != self._engine:
            self.close()
            self._engine = engine
        pool = self._pools.get(size)
        if pool is not None and pool.is_alive and pool.num_threads > _MAX_THREADS:
            pool.close()
        if pool is None or not pool.is_alive:
            pool = self._pools[size] = RankPool(size, engine)
        return pool

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()


def _serve(pipe: Connection, rank: int, size: int, port: int, listener: socket.socket | None, seconds: int) -> None:
    os.environ.update(GLOO_SOCKET_IFNAME="lo", HF_HUB_OFFLINE="1")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    # a store that opens its own socket would listen on every interface
    hosting = {} if listener is None else {"master_listen_fd": listener.detach()}
    store = dist.TCPStore("127.0.0.1", port, size, is_master=rank == 0, timeout=timedelta(seconds=60), **hosting)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=seconds))
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, function(*args)))
        except BaseException:  # raised in the test
            pipe.send((False, traceback.format_exc()))
