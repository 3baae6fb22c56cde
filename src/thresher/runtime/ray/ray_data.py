"""Data preparation on Ray Data: workers read and tokenize spans of the sources in bounded memory.

Ray Data limits the results in its object store, blocks workers that are ahead of the writer, and returns results in the
order of the tasks. Unpaired rows are read, joined and tokenized in this process.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from itertools import groupby

from thresher.data.prepare.blocks import BlockResult, BlockWorker, SpanTask, TaskReader
from thresher.data.prepare.executor import RESULT_COLUMN, TASK_COLUMN, Executor, Results, SpanWorker
from thresher.errors import UserError
from thresher.optional import require
from thresher.runtime.ray.environment import set_environment

# limit of results that wait for the writer: a few spans per worker, independent of the size of the sources
_BYTES_PER_WORKER = 64 << 20
_BYTES_PER_RESULT_BLOCK = 8 << 20


def run_on_ray(num_workers: int, address: str | None = None) -> Executor:
    """Return an executor with workers on the cluster at `address`, or on a local cluster that it starts."""
    require("preparation on Ray", "ray", extra="ray")

    def run(worker: BlockWorker, reader: TaskReader, spans: Sequence[SpanTask]) -> Results:
        set_environment(address)
        from thresher.runtime.ray.session import ray_session

        with ray_session(address):
            for is_unpaired, group in groupby(spans, key=lambda task: task.is_unpaired):
                if is_unpaired:
                    yield from (worker(block) for task in group for block in reader.read(task))
                else:
                    yield from _run_spans(worker, list(group), num_workers)

    return run


def _run_spans(worker: BlockWorker, spans: Sequence[SpanTask], num_workers: int) -> Iterator[BlockResult]:
    import ray
    import ray.data

    logging.getLogger("ray.data").setLevel(logging.ERROR)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.target_max_block_size = _BYTES_PER_RESULT_BLOCK
    context.execution_options.preserve_order = True
    context.execution_options.resource_limits = ray.data.ExecutionResources(
        object_store_memory=num_workers * _BYTES_PER_WORKER
    )
    # fractional cores, so that one core is left for Ray Data and the writer
    num_cpus = min(1.0, max(0.5, ray.cluster_resources().get("CPU", 1.0) - 1) / num_workers)
    tasks = ray.data.from_items([{TASK_COLUMN: task} for task in spans], override_num_blocks=len(spans))
    results = tasks.map_batches(
        SpanWorker,
        fn_constructor_args=(worker,),
        batch_size=1,
        compute=ray.data.ActorPoolStrategy(size=min(num_workers, len(spans))),
        num_cpus=num_cpus,
    )
    for batch in results.iter_batches(batch_size=None, batch_format="numpy"):
        for result in batch[RESULT_COLUMN]:
            if isinstance(result, UserError):
                raise result
            yield result
