"""Which checkpoints there are, which one to resume from, which to keep.

Everything is read from the disk, so that a run that was killed and started again decides as if it had never
stopped.
"""

import logging
import math
from pathlib import Path
from typing import Literal

from thresher.checkpoint.manifest import Manifest, verify
from thresher.checkpoint.staging import delete, step_of
from thresher.errors import CheckpointError

logger = logging.getLogger(__name__)


def list_checkpoints(root: Path) -> list[Path]:
    """Name the published checkpoints below `root`, oldest first, without verifying them."""
    if not root.is_dir():
        return []
    steps = {step: path for path in root.iterdir() if path.is_dir() and (step := step_of(path)) is not None}
    return [steps[step] for step in sorted(steps)]


def latest(root: Path) -> Path | None:
    """Find the newest checkpoint that verifies; warn of each newer one that does not."""
    for path in reversed(list_checkpoints(root)):
        fault = _fault(path)
        if fault is None:
            return path
        logger.warning("passed over a checkpoint: %s", fault)
    return None


def resolve_resume(value: Literal[False] | str, root: Path) -> Path | None:
    """Turn the setting `resume_from_checkpoint` into a verified checkpoint.

    False: none. `auto`: the newest that verifies, or none. A path: that one.
    """
    if value is False:
        return None
    if value == "auto":
        return latest(root)
    path = Path(value)
    inner = list_checkpoints(path)
    if inner:
        raise CheckpointError(f"{path} holds checkpoints but is none; did you mean {inner[-1]}?")
    verify(path)
    return path


def best(root: Path, metric: str, *, higher_is_better: bool) -> Path | None:
    """Find the checkpoint whose manifest has the best value of a metric: never NaN, the earlier on a tie."""
    found: Path | None = None
    value = math.nan
    for path in list_checkpoints(root):
        try:
            # Sizes are enough to choose by; `prune` and a resume verify before they rely on it.
            candidate = verify(path, digests=False).metrics.get(metric, math.nan)
        except CheckpointError:
            continue
        beats = candidate > value if higher_is_better else candidate < value
        if beats or (math.isnan(value) and not math.isnan(candidate)):
            found, value = path, candidate
    return found


def prune(root: Path, keep_last: int, best: Path | None = None, *, trusted: Path | None = None) -> list[Path]:
    """Delete all but the newest `keep_last` checkpoints and the best one; return what was deleted.

    Where none of those verifies, the newest one that does is kept too. `trusted` is a checkpoint that this
    process has just published, which need not be read again to know that it verifies.
    """
    if keep_last < 1:
        raise ValueError(f"at least one checkpoint must be kept, got keep_last={keep_last}")
    everything = list_checkpoints(root)
    keep = set(everything[-keep_last:])
    if best is not None:
        keep.add(best)
    doomed = [path for path in everything if path not in keep]
    kept = [path for path in everything if path in keep]
    if doomed and trusted not in keep:
        last_sound = next((path for path in [*reversed(kept), *reversed(doomed)] if _fault(path) is None), None)
        doomed = [path for path in doomed if path != last_sound]
    for path in doomed:
        delete(path)
    return doomed


def _fault(path: Path) -> str | None:
    try:
        manifest: Manifest = verify(path)
    except CheckpointError as error:
        return str(error)
    if manifest.step != step_of(path):
        return f"{path} holds step {manifest.step}, not the step of its name"
    return None
