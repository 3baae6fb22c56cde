"""A run's checkpoints: save, find the one to resume from, apply the retention policy.

All decisions are made from the files on disk, so a restarted run decides like an uninterrupted one.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from thresher.checkpoint.manifest import MANIFEST_NAME, Digests, FileRecord, record_files, verify
from thresher.checkpoint.save import (
    Staging,
    Write,
    create_staging,
    delete,
    discard,
    publish,
    recover,
    step_name,
    step_of,
    translate_save_errors,
)
from thresher.checkpoint.tensor_files import pack_headers, save_indexes
from thresher.distributed.run_on_all import Communicator, run_on_all
from thresher.errors import CheckpointError

logger = logging.getLogger(__name__)

# the ranks verify the other files, of which this process reads none
READ_BY_DRIVER = ("config.json", "trainer.json")


class DamagedCheckpoints:
    """Checkpoints that this run has found damaged; a later save of the same step is a different checkpoint."""

    def __init__(self) -> None:
        self._reasons: dict[tuple[Path, int, int], CheckpointError] = {}

    def add(self, path: Path, reason: CheckpointError) -> None:
        self._reasons[_identity(path)] = reason

    def find(self, path: Path) -> CheckpointError | None:
        """Return why a checkpoint is damaged; None if it is not known to be."""
        return self._reasons.get(_identity(path)) if (path / MANIFEST_NAME).is_file() else None


def _identity(path: Path) -> tuple[Path, int, int]:
    manifest = (path / MANIFEST_NAME).stat()
    return path.resolve(), manifest.st_ino, manifest.st_mtime_ns


def list_checkpoints(root: Path) -> list[Path]:
    """List the published checkpoints below `root`, oldest first, without verifying them."""
    if not root.is_dir():
        return []
    steps = {step: path for path in root.iterdir() if path.is_dir() and (step := step_of(path)) is not None}
    return [steps[step] for step in sorted(steps)]


def latest(root: Path, *, digests: Digests = True, damaged: DamagedCheckpoints | None = None) -> Path | None:
    """Find the newest valid checkpoint; warn about each newer one that is not, unless it is known to be damaged."""
    for path in reversed(list_checkpoints(root)):
        if damaged is not None and damaged.find(path) is not None:
            continue
        reason = _invalid_reason(path, digests=digests)
        if reason is None:
            return path
        logger.warning("skipped an invalid checkpoint: %s", reason)
    return None


def resolve_resume(
    value: Literal[False] | str, root: Path, *, digests: Digests = True, damaged: DamagedCheckpoints | None = None
) -> Path | None:
    """Turn the setting `resume_from_checkpoint` into a verified checkpoint.

    False: none. `auto`: the newest valid one, or none. A path: that one. None of the `damaged` ones is chosen.
    """
    if value is False:
        return None
    if value == "auto":
        return latest(root, digests=digests, damaged=damaged)
    path = Path(value)
    if inner := list_checkpoints(path):
        raise CheckpointError(f"{path} contains checkpoints but is not one itself; did you mean {inner[-1]}?")
    verify(path, digests=digests)
    if damaged is not None and (reason := damaged.find(path)) is not None:
        raise reason
    return path


def best(root: Path, metric: str, *, higher_is_better: bool) -> Path | None:
    """Find the checkpoint whose manifest has the best value of a metric: never NaN, the earlier on a tie."""
    found: Path | None = None
    value = math.nan
    for path in list_checkpoints(root):
        try:
            # sizes are enough to choose by; `prune` and a resume verify the digests before they rely on it
            candidate = verify(path, digests=False).metrics.get(metric, math.nan)
        except CheckpointError:
            continue
        is_better = candidate > value if higher_is_better else candidate < value
        if is_better or (math.isnan(value) and not math.isnan(candidate)):
            found, value = path, candidate
    return found


def prune(root: Path, keep_last: int, best: Path | None = None, *, trusted: Path | None = None) -> list[Path]:
    """Delete all but the newest `keep_last` checkpoints and the best one; return the deleted ones.

    If none of those is valid, the newest valid one is kept too. `trusted` is a checkpoint that this process has just
    published; it counts as valid without being read again.
    """
    if keep_last < 1:
        raise ValueError(f"at least one checkpoint must be kept, got keep_last={keep_last}")
    checkpoints = list_checkpoints(root)
    keep = set(checkpoints[-keep_last:])
    if best is not None:
        keep.add(best)
    to_delete = [path for path in checkpoints if path not in keep]
    kept = [path for path in checkpoints if path in keep]
    if to_delete and trusted not in keep:
        candidates = [*reversed(kept), *reversed(to_delete)]
        last_valid = next((path for path in candidates if _invalid_reason(path) is None), None)
        to_delete = [path for path in to_delete if path != last_valid]
    for path in to_delete:
        delete(path)
    return to_delete


def _invalid_reason(path: Path, *, digests: Digests = True) -> str | None:
    try:
        step = verify(path, digests=digests).step
    except CheckpointError as error:
        return str(error)
    return None if step == step_of(path) else f"{path} contains step {step}, which is not the step in its name"


@dataclass(frozen=True)
class CheckpointManager:
    """A run's checkpoint directory and its retention policy."""

    root: Path
    keep_last: int
    metric_for_best: str
    higher_is_better: bool

    def save(self, step: int, write: Write, metrics: Mapping[str, float], communicator: Communicator) -> Path:
        """Publish the files that all processes write, then prune older checkpoints."""
        staging: Staging | None = None
        headers: dict[str, bytes] = {}
        what = "save the checkpoint"

        def create() -> Path | None:
            nonlocal staging
            staging = create_staging(self.root, step) if communicator.rank == 0 else None
            return None if staging is None else staging.path

        def write_and_record(path: Path) -> dict[str, FileRecord]:
            if not path.is_dir():
                hint = "all workers must save to one shared file system"
                raise CheckpointError(f"a worker cannot see {path}, which rank 0 created; {hint}")
            nonlocal headers
            with translate_save_errors(self.root, step):
                names = write(path)
                headers = pack_headers(path, names)
                return record_files(path, names)

        def finish() -> None:
            if staging is not None:
                known = {name: record for of_rank in records for name, record in of_rank.items()}
                with translate_save_errors(self.root, step):
                    known |= record_files(staging.path, save_indexes(staging.path, gathered or ()))
                published = publish(staging, metrics=metrics, records=known)
                with translate_save_errors(self.root, step):
                    prune(self.root, self.keep_last, self.best(), trusted=published)

        try:
            path = run_on_all(communicator, create, what)[0]
            assert path is not None  # noqa: S101  of rank 0
            records = run_on_all(communicator, lambda: write_and_record(path), what)
            gathered = communicator.gather_object(headers)
            run_on_all(communicator, finish, what)
        except BaseException:
            if staging is not None:
                discard(staging)
            raise
        return self.path_for(step)

    def path_for(self, step: int) -> Path:
        """Return the path of a step's checkpoint, published or not."""
        return self.root / step_name(step)

    def best(self) -> Path | None:
        return best(self.root, self.metric_for_best, higher_is_better=self.higher_is_better)

    def find_to_resume(self, setting: Literal[False] | str, damaged: DamagedCheckpoints | None = None) -> Path | None:
        """Remove the files of interrupted saves and find the checkpoint to resume from.

        Only names, sizes and the files that the driver reads are checked; `find_damage` checks the others, and
        `damaged` remembers what it has found.
        """
        for line in recover(self.root):
            logger.info("%s", line)
        return self.look_up(setting, digests=READ_BY_DRIVER, damaged=damaged)

    def look_up(
        self, setting: Literal[False] | str, *, digests: Digests, damaged: DamagedCheckpoints | None = None
    ) -> Path | None:
        """Find the checkpoint to resume from."""
        found = resolve_resume(setting, self.root, digests=digests, damaged=damaged)
        newer = [path for path in list_checkpoints(self.root) if found is None or path.name > found.name]
        if setting != "auto" and newer:  # two runs in one directory: a later `auto` would take the newest of either
            raise CheckpointError(
                f"{self.root} contains checkpoints of an earlier run, up to {newer[-1].name}; continue it with "
                f"resume_from_checkpoint=auto, or start again: delete {self.root}, or set a different output_dir, such "
                f"as output_dir={self.root.parent}-2"
            )
        return found
