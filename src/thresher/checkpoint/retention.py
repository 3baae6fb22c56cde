"""Find checkpoints: which exist, which one to resume from, which to keep.

All decisions are made from the files on disk, so a restarted run decides like an uninterrupted one.
"""

import logging
import math
from pathlib import Path
from typing import Literal

from thresher.checkpoint.manifest import verify
from thresher.checkpoint.staging import delete, step_of
from thresher.errors import CheckpointError

logger = logging.getLogger(__name__)


def list_checkpoints(root: Path) -> list[Path]:
    """List the published checkpoints below `root`, oldest first, without verifying them."""
    if not root.is_dir():
        return []
    steps = {step: path for path in root.iterdir() if path.is_dir() and (step := step_of(path)) is not None}
    return [steps[step] for step in sorted(steps)]


def latest(root: Path, *, digests: bool = True) -> Path | None:
    """Find the newest valid checkpoint; warn about each newer one that is not."""
    for path in reversed(list_checkpoints(root)):
        reason = _invalid_reason(path, digests=digests)
        if reason is None:
            return path
        logger.warning("skipped an invalid checkpoint: %s", reason)
    return None


def resolve_resume(value: Literal[False] | str, root: Path, *, digests: bool = True) -> Path | None:
    """Turn the setting `resume_from_checkpoint` into a verified checkpoint.

    False: none. `auto`: the newest valid one, or none. A path: that one. Without digests, only names and sizes count.
    """
    if value is False:
        return None
    if value == "auto":
        return latest(root, digests=digests)
    path = Path(value)
    inner = list_checkpoints(path)
    if inner:
        raise CheckpointError(f"{path} contains checkpoints but is not one itself; did you mean {inner[-1]}?")
    verify(path, digests=digests)
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


def _invalid_reason(path: Path, *, digests: bool = True) -> str | None:
    try:
        step = verify(path, digests=digests).step
    except CheckpointError as error:
        return str(error)
    return None if step == step_of(path) else f"{path} contains step {step}, which is not the step in its name"
