"""Executors run the conversion of blocks: in this process, in several, or by `SpanWorker`s of Ray Data.

An executor yields results in task order and keeps a bounded number of them in memory. The one for a Ray cluster is in
`runtime/ray/ray_data`; its worker is here, so worker processes import only what tokenization needs.
"""

from __future__ import annotations

import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import chain, islice
from typing import Any

import numpy as np
import numpy.typing as npt

from thresher.data.prepare.blocks import BlockResult, BlockTask, BlockWorker, SpanTask, TaskReader, read_task
from thresher.errors import UserError

# closing the generator stops the executor
Results = Generator[BlockResult, None, None]
Executor = Callable[[BlockWorker, TaskReader, Sequence[SpanTask]], Results]


def local_executor(num_processes: int) -> Executor:
    """Read spans in this process; tokenize here, or in a pool of at most num_processes if there is work for several."""

    def run(worker: BlockWorker, reader: TaskReader, spans: Sequence[SpanTask]) -> Results:
        tasks: Iterator[BlockTask] = (task for span in spans for task in reader.read(span))
        # read ahead no further than the pool does: whatever follows these is work for all processes
        first = list(islice(tasks, 2 * num_processes)) if num_processes > 1 else []
        tasks, useful = chain(first, tasks), useful_processes(num_processes, len(first))
        yield from map(worker, tasks) if useful == 1 else _run_in_processes(worker, tasks, useful)

    return run


def useful_processes(num_processes: int, num_blocks: int) -> int:
    """Limit the processes to those with two blocks to tokenize: starting one takes longer than a block."""
    return max(1, min(num_processes, num_blocks // 2))


def _run_in_processes(worker: BlockWorker, tasks: Iterator[BlockTask], num_processes: int) -> Results:
    pool = ProcessPoolExecutor(
        num_processes,
        # spawn: a fork would copy the locks of threads that torch and the tokenizers may have started
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_process,
        initargs=(worker,),
    )
    # bounded: the reader must not load the whole dataset ahead of the writer
    pending: deque[Future[BlockResult]] = deque()
    try:
        for task in tasks:
            pending.append(pool.submit(_run_task, task))
            if len(pending) > 2 * num_processes:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool as error:
        raise UserError(
            f"one of {num_processes} tokenizer processes was killed, most likely out of memory; "
            "use fewer processes (completed work is kept)"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


_worker: BlockWorker


def _start_process(worker: BlockWorker) -> None:
    global _worker
    # one thread per process: the processes already use all cores
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker = worker


def _run_task(task: BlockTask) -> BlockResult:
    return _worker(task)


TASK_COLUMN, RESULT_COLUMN = "task", "result"
ObjectBatch = dict[str, npt.NDArray[np.object_]]


class SpanWorker:
    """Ray Data worker that reads spans and converts their blocks: batches of tasks in, batches of results out."""

    def __init__(self, worker: BlockWorker) -> None:
        # one thread per process: the processes already use all cores
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        self._worker = worker

    def __call__(self, batch: Mapping[str, Sequence[SpanTask]]) -> Iterator[ObjectBatch]:
        try:
            for task in batch[TASK_COLUMN]:
                for block in read_task(task):
                    yield _batch_of(self._worker(block))
        except UserError as error:
            # returned, not raised: Ray would wrap it and might retry the task
            yield _batch_of(error)


def _batch_of(value: Any) -> ObjectBatch:
    column = np.empty(1, dtype=np.object_)
    column[0] = value
    return {RESULT_COLUMN: column}
