"""Save one checkpoint from all processes: each writes its files, rank 0 publishes, and an error on one fails all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias, TypeVar

from thresher.checkpoint.manifest import FileRecord, record_files
from thresher.checkpoint.staging import Staging, create_staging, discard, publish, translate_save_errors
from thresher.distributed.run_on_all import Communicator, run_on_all
from thresher.errors import CheckpointError

T = TypeVar("T")
# Writes this process's files into a directory and returns their names.
Write: TypeAlias = Callable[[Path], Sequence[str]]


def save_collectively(
    root: Path,
    step: int,
    write: Write,
    metrics: Mapping[str, float],
    communicator: Communicator,
    clean_up: Callable[[], None],
) -> None:
    """Publish the files that all processes write; then rank 0 calls `clean_up`."""
    staging: Staging | None = None

    def create() -> Path | None:
        nonlocal staging
        staging = create_staging(root, step) if communicator.rank == 0 else None
        return None if staging is None else staging.path

    try:
        path = _on_all(communicator, create)[0]
        if path is None:
            raise TypeError("rank 0 returned no staging directory")
        records = _on_all(communicator, lambda: _write_and_record(write, path, root, step))
    except BaseException:
        if staging is not None:
            discard(staging)
        raise

    def finish() -> None:
        if staging is not None:
            all_records = {name: record for of_rank in records for name, record in of_rank.items()}
            publish(staging, metrics=metrics, records=all_records)
            with translate_save_errors(root, step):
                clean_up()

    _on_all(communicator, finish)


def _write_and_record(write: Write, path: Path, root: Path, step: int) -> dict[str, FileRecord]:
    if not path.is_dir():
        raise CheckpointError(
            f"a worker cannot see {path}, which rank 0 created; all workers must save to one shared file system"
        )
    with translate_save_errors(root, step):
        return record_files(path, write(path))


def _on_all(communicator: Communicator, function: Callable[[], T]) -> list[T]:
    return run_on_all(communicator, function, "save the checkpoint", passed_on=CheckpointError)
