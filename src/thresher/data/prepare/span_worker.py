"""The worker of a process that reads its own spans: batches of tasks in, batches of results out, as Ray Data has them.

It lies here and not in `runtime/` so that such a process loads what tokenising needs and no more.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from thresher.data.prepare.block_worker import BlockWorker
from thresher.data.prepare.tasks import SpanTask, read_task
from thresher.errors import UserError

TASK_COLUMN, RESULT_COLUMN = "task", "result"
ObjectBatch = dict[str, npt.NDArray[np.object_]]


class SpanWorker:
    """Read spans and turn their blocks into pairs, one block after the other."""

    def __init__(self, worker: BlockWorker) -> None:
        # one thread a process: the processes are the parallelism
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        self._worker = worker

    def __call__(self, batch: Mapping[str, Sequence[SpanTask]]) -> Iterator[ObjectBatch]:
        try:
            for task in batch[TASK_COLUMN]:
                for block in read_task(task):
                    yield _batch_of(self._worker(block))
        except UserError as error:
            # as a result, not as a failure: what a person can mend should arrive in its own words, and is not retried
            yield _batch_of(error)


def _batch_of(value: Any) -> ObjectBatch:
    column = np.empty(1, dtype=np.object_)
    column[0] = value
    return {RESULT_COLUMN: column}
