"""A worker of the policy whose process lives, but which never enters the collectives of a step."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from thresher.runtime.ray.workers import ActorWorker

STEP, VARIABLE = 4, "STALL_ONCE"


class StallingWorker(ActorWorker):
    """The last rank sleeps in step 4 of its first attempt; the file that VARIABLE names says when, and that it did."""

    def drain(self, method: str, *arguments: object) -> None:
        if method == "run":
            self._stall_once()
        super().drain(method, *arguments)

    def _stall_once(self) -> None:
        mark, engine = Path(os.environ[VARIABLE]), self.trainer.engine
        train_step = engine.train_step

        def stall_before_a_step(*arguments: Any, **named: Any) -> Any:
            if self.trainer.state.step + 1 == STEP and not mark.exists():
                mark.write_text(repr(time.time()))
                never_enter_the_collectives()
            return train_step(*arguments, **named)

        engine.train_step = stall_before_a_step  # type: ignore[method-assign]


def never_enter_the_collectives() -> None:
    while True:
        time.sleep(1)
