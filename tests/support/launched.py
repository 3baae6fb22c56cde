"""Run `thresher` as one rank of a launched run, and let a rank fail in a step.

    torchrun --nproc-per-node 2 -m tests.support.launched RANK:HOW:STEP train CONFIG.yaml ...

HOW: kill, with SIGKILL after the step, or fail, with a user error in it.
"""

from __future__ import annotations

import os
import sys

from tests.support.train_and_kill import kill_at
from thresher.cli import main
from thresher.errors import UserError
from thresher.training.trainer import RankTrainer


def fail_at(step: int) -> None:
    training_step = RankTrainer.training_step

    def fail(self: RankTrainer) -> object:
        if self.state.step + 1 == step:
            raise UserError(f"step {step} fails on purpose")
        return training_step(self)

    RankTrainer.training_step = fail


if __name__ == "__main__":
    rank, how, step = sys.argv.pop(1).split(":")
    if os.environ.get("RANK", os.environ.get("SLURM_PROCID")) == rank:
        kill_at("step", int(step)) if how == "kill" else fail_at(int(step))
    main()
