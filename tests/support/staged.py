"""A checkpoint of any files, saved by one process."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from thresher.checkpoint.staging import create_staging, discard, publish, readable_errors


@contextmanager
def staging(root: Path, step: int, *, metrics: Mapping[str, float] | None = None) -> Iterator[Path]:
    """Give a directory to write into; leaving the block publishes it, an exception removes it."""
    stage = create_staging(root, step)
    try:
        with readable_errors(root, step):
            yield stage.path
    except BaseException:
        discard(stage)
        raise
    publish(stage, metrics=metrics)
