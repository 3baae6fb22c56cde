"""The checkpoints of one run: save in the foreground or in a thread, resume, and apply the retention policy."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from thresher.checkpoint.collective_save import Write, save_collectively
from thresher.checkpoint.host_buffers import HostBuffers
from thresher.checkpoint.retention import DamagedCheckpoints, best, list_checkpoints, prune, resolve_resume
from thresher.checkpoint.staging import recover, step_name
from thresher.distributed.run_on_all import Communicator
from thresher.errors import CheckpointError

logger = logging.getLogger(__name__)

# the ranks verify the other files, of which this process reads none
READ_BY_DRIVER = ("config.json", "trainer.json")


@dataclass(frozen=True)
class CheckpointManager:
    """The checkpoint directory of a run and its retention policy."""

    root: Path
    keep_last: int
    metric_for_best: str
    higher_is_better: bool

    def save(self, step: int, write: Write, metrics: Mapping[str, float], communicator: Communicator) -> Path:
        """Publish the files that all processes write, then prune older checkpoints."""
        published = self.path_for(step)

        def clean_up() -> None:
            prune(self.root, self.keep_last, self.best(), trusted=published)

        save_collectively(self.root, step, write, metrics, communicator, clean_up)
        return published

    def path_for(self, step: int) -> Path:
        """Return the path of a step's checkpoint, published or not."""
        return self.root / step_name(step)

    def best(self) -> Path | None:
        return best(self.root, self.metric_for_best, higher_is_better=self.higher_is_better)

    def find_to_resume(self, setting: Literal[False] | str, damaged: DamagedCheckpoints | None = None) -> Path | None:
        """Remove the files of interrupted saves and find the checkpoint to resume from.

        Only names, sizes and the files that the driver reads are checked; `find_damage` checks the others. damaged:
        checkpoints in which it has found something.
        """
        for line in recover(self.root):
            logger.info("%s", line)
        return self.look_up(setting, digests=READ_BY_DRIVER, damaged=damaged)

    def look_up(
        self,
        setting: Literal[False] | str,
        *,
        digests: bool | Collection[str],
        damaged: DamagedCheckpoints | None = None,
    ) -> Path | None:
        """Find the checkpoint to resume from; digests: see `verify`."""
        found = resolve_resume(setting, self.root, digests=digests, damaged=damaged)
        if setting != "auto":
            self._reject_newer(found)
        return found

    def _reject_newer(self, start: Path | None) -> None:
        """Keep two runs out of one directory: a later `auto` would take the newest checkpoint of either."""
        newer = [path for path in list_checkpoints(self.root) if start is None or path.name > start.name]
        if newer:
            raise CheckpointError(
                f"{self.root} contains checkpoints of an earlier run, up to {newer[-1].name}; continue it with "
                f"resume_from_checkpoint=auto, or start again: delete {self.root}, or set another output_dir, such as "
                f"output_dir={self.root.parent}-2"
            )


class AsyncSaver:
    """Write a snapshot in a thread while training continues; at most one save is pending.

    An error is raised at the next step, the next save or the end of the run, whichever comes first.
    The thread uses a separate communicator so that its collectives cannot interleave with those of training. All ranks
    call `make_communicator` at their first save. The thread is not a daemon: the process waits for a pending save.
    """

    def __init__(self, manager: CheckpointManager, make_communicator: Callable[[], Communicator]):
        self._manager = manager
        self._make_communicator = make_communicator
        self._communicator: Communicator | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._pending: Future[Path] | None = None
        self.copies = HostBuffers()

    def submit(self, step: int, write: Write, metrics: Mapping[str, float]) -> None:
        """Start a save; call `wait` first."""
        if self._pending is not None:
            raise RuntimeError("a save is pending; call wait() first")
        self._communicator = self._communicator or self._make_communicator()
        self._thread = self._thread or ThreadPoolExecutor(1, "save")
        self._pending = self._thread.submit(self._manager.save, step, write, metrics, self._communicator)

    def wait(self) -> None:
        """Wait for the pending save, if any, and raise its error."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.result()

    def check(self) -> None:
        """Raise the error of a finished save; do not wait for an unfinished one."""
        if self._pending is not None and self._pending.done():
            self.wait()
