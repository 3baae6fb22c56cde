"""Ray Data worker that reads and tokenizes spans: batches of tasks in, batches of results out.

It is in `data/` and not in `runtime/` so that worker processes import only what tokenization needs.
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
    """Read spans and convert their blocks to pairs, one block at a time."""

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
