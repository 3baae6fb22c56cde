"""The checkpoints of one run: save, resume, keep the last few and the best."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from thresher.checkpoint.directory import recover, step_name
from thresher.checkpoint.parts import Alone, Processes
from thresher.checkpoint.retention import best, list_checkpoints, prune, resolve_resume
from thresher.checkpoint.saving import Write, save_together
from thresher.errors import CheckpointError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CheckpointKeeper:
    """Where checkpoints lie and which of them stay."""

    root: Path
    keep_last: int
    metric_for_best: str
    higher_is_better: bool

    def save(self, step: int, write: Write, metrics: Mapping[str, float], processes: Processes | None = None) -> Path:
        """Publish what all processes write into one directory, then let go of what need not stay."""
        published = self.place(step)

        def clean_up() -> None:
            prune(self.root, self.keep_last, self.best(), trusted=published)

        save_together(self.root, step, write, metrics, processes or Alone(), clean_up)
        return published

    def place(self, step: int) -> Path:
        """Where the checkpoint of a step lies, once it is published."""
        return self.root / step_name(step)

    def best(self) -> Path | None:
        return best(self.root, self.metric_for_best, higher_is_better=self.higher_is_better)

    def resume(self, setting: bool | str) -> Path | None:
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
