"""Who turns tasks into pairs: this process, or several beside it. `runtime/preparing` has the one for a Ray cluster.

Results come in the order of the tasks, whoever finishes first, and only a few are waiting at any time.
"""

from __future__ import annotations

import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

from thresher.data.prepare.block_worker import BlockResult, BlockTask, BlockWorker
from thresher.data.prepare.tasks import SpanTask, TaskReader
from thresher.errors import UserError

# closing what it returns ends the work
Results = Generator[BlockResult, None, None]
Executor = Callable[[BlockWorker, TaskReader, Sequence[SpanTask]], Results]


def local_executor(num_processes: int) -> Executor:
    """Read in this process, and tokenise here or, if there are to be several processes, in those."""

    def run(worker: BlockWorker, reader: TaskReader, spans: Sequence[SpanTask]) -> Results:
        tasks = (task for span in spans for task in reader.read(span))
        yield from map(worker, tasks) if num_processes == 1 else _run_in_processes(worker, tasks, num_processes)

    return run


def _run_in_processes(worker: BlockWorker, tasks: Iterator[BlockTask], num_processes: int) -> Results:
    pool = ProcessPoolExecutor(
        num_processes,
        # spawn: a fork would copy the locks of threads that torch and the tokenizers may have started
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_process,
        initargs=(worker,),
    )
    # a bounded window: the reader must not run ahead of the writer by the whole data set
    waiting: deque[Future[BlockResult]] = deque()
    try:
        for task in tasks:
            waiting.append(pool.submit(_run_task, task))
            if len(waiting) > 2 * num_processes:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise UserError(
            f"one of {num_processes} processes that tokenise was killed, most often for want of memory; "
            "use fewer processes; what is finished is kept"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


_worker: BlockWorker | None = None


def _start_process(worker: BlockWorker) -> None:
    global _worker
    # one thread a process: the processes are the parallelism
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker = worker


def _run_task(task: BlockTask) -> BlockResult:
    if _worker is None:
        raise AssertionError("a process of the pool was not set up")
    return _worker(task)
