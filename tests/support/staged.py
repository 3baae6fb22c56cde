"""Save a checkpoint of arbitrary files from one process."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from thresher.checkpoint.save import create_staging, discard, publish, translate_save_errors


@contextmanager
def staging(root: Path, step: int, *, metrics: Mapping[str, float] | None = None) -> Iterator[Path]:
    """Yield a directory to write into; publish it at the end of the block, or remove it after an exception."""
    stage = create_staging(root, step)
    try:
        with translate_save_errors(root, step):
            yield stage.path
    except BaseException:
        discard(stage)
        raise
    publish(stage, metrics=metrics)
