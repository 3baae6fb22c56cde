"""The checkpoints of one run: save, resume, keep the last few and the best."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from thresher.checkpoint.collective_save import Write, save_collectively
from thresher.checkpoint.retention import best, list_checkpoints, prune, resolve_resume
from thresher.checkpoint.sharded import Communicator, HostBuffers
from thresher.checkpoint.staging import recover, step_name
from thresher.errors import CheckpointError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CheckpointManager:
    """Where checkpoints lie and which of them stay."""

    root: Path
    keep_last: int
    metric_for_best: str
    higher_is_better: bool

    def save(self, step: int, write: Write, metrics: Mapping[str, float], processes: Communicator) -> Path:
        """Publish what all processes write into one directory, then let go of what need not stay."""
        published = self.path_for(step)

        def clean_up() -> None:
            prune(self.root, self.keep_last, self.best(), trusted=published)

        save_collectively(self.root, step, write, metrics, processes, clean_up)
        return published

    def path_for(self, step: int) -> Path:
        """Where the checkpoint of a step lies, once it is published."""
        return self.root / step_name(step)

    def best(self) -> Path | None:
        return best(self.root, self.metric_for_best, higher_is_better=self.higher_is_better)

    def resume(self, setting: Literal[False] | str) -> Path | None:
        """Clear away what a crash left and find the checkpoint to go on from."""
        for line in recover(self.root):
            logger.info("%s", line)
        found = resolve_resume(setting, self.root)
        if setting != "auto":
            self._refuse_newer_than(found)
        return found

    def _refuse_newer_than(self, start: Path | None) -> None:
        """Two runs in one directory would be resumed as one: a later `auto` takes the newest, whoever made it."""
        newer = [path for path in list_checkpoints(self.root) if start is None or path.name > start.name]
        if newer:
            raise CheckpointError(
                f"{self.root} holds checkpoints of an earlier run, up to {newer[-1].name}; go on with "
                "resume_from_checkpoint=auto, or set another output_dir"
            )


class AsyncSaver:
    """Write what was copied in a thread while training goes on; at most one save is under way.

    A failure is raised at the next chance: the next step, the next save, or the end of the run.
    The thread speaks to other processes over `open_line`, made when it is first needed and by all of them: its
    messages must not meet those of training. It is no daemon: a process that ends waits for a save that is under way.
    """

    def __init__(self, keeper: CheckpointManager, open_line: Callable[[], Communicator]):
        self._keeper = keeper
        self._open_line = open_line
        self._line: Communicator | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._under_way: Future[Path] | None = None
        self.copies = HostBuffers()

    def submit(self, step: int, write: Write, metrics: Mapping[str, float]) -> None:
        """Start to write; the save before must be over, which `wait` makes sure of."""
        if self._under_way is not None:
            raise RuntimeError("a save is under way; wait for it first")
        self._line = self._line or self._open_line()
        self._thread = self._thread or ThreadPoolExecutor(1, "save")
        self._under_way = self._thread.submit(self._keeper.save, step, write, metrics, self._line)

    def wait(self) -> None:
        """Return when no save is under way; raise its failure."""
        if self._under_way is not None:
            under_way, self._under_way = self._under_way, None
            under_way.result()

    def check(self) -> None:
        """Raise the failure of a save that is over, without waiting for one that is not."""
        if self._under_way is not None and self._under_way.done():
            self.wait()
