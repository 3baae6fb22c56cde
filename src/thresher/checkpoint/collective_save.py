"""One save by all processes together: each writes its own files, the first publishes, and a failure is everyone's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias, TypeVar

from thresher.checkpoint.manifest import FileRecord, record_files
from thresher.checkpoint.sharded import Communicator
from thresher.checkpoint.staging import Staging, create_staging, discard, publish, readable_errors
from thresher.errors import CheckpointError, UserError, WorkerLostError

T = TypeVar("T")
# Writes this process's files into a directory and names them.
Write: TypeAlias = Callable[[Path], Sequence[str]]


def save_collectively(
    root: Path,
    step: int,
    write: Write,
    metrics: Mapping[str, float],
    processes: Communicator,
    clean_up: Callable[[], None],
) -> None:
    """Publish what all processes write; then, in the first of them, let go of what need not stay."""
    stage: Staging | None = None

    def create() -> Path | None:
        nonlocal stage
        if processes.rank == 0:
            stage = create_staging(root, step)
        return stage.path if stage is not None else None

    try:
        path = _all_or_none(processes, create)[0]
        if path is None:
            raise TypeError("the first process made no directory")
        records = _all_or_none(processes, lambda: _write_own(write, path, root, step))
    except BaseException:
        if stage is not None:
            discard(stage)
        raise

    def finish() -> None:
        if stage is not None:
            every = {name: record for own in records for name, record in own.items()}
            publish(stage, metrics=metrics, records=every)
            with readable_errors(root, step):
                clean_up()

    _all_or_none(processes, finish)


def _write_own(write: Write, path: Path, root: Path, step: int) -> dict[str, FileRecord]:
    if not path.is_dir():
        raise CheckpointError(
            f"a worker cannot see {path}, which the first one made; all workers must save to one shared file system"
        )
    with readable_errors(root, step):
        return record_files(path, write(path))


def _all_or_none(processes: Communicator, act: Callable[[], T]) -> list[T]:
    """Act in every process; what fails in one fails in all, with the same message."""
    value: T | None = None
    failure: Exception | None = None
    try:
        value = act()
    except Exception as error:
        failure = error
    answers = processes.all_gather_object((value, failure and _told(failure)))
    if failure is not None:
        raise failure
    for _, told in answers:
        if told is not None:
            raise told
    return [answer for answer, _ in answers]  # type: ignore[misc]


def _told(failure: Exception) -> UserError:
    """What the others are told; what nobody foresaw may pass, as it may where it happened."""
    if isinstance(failure, CheckpointError):
        return failure
    return WorkerLostError(f"a worker could not save: {failure!r}")
