"""Run `thresher` as one rank of a launched run, and let a rank fail in a step.

    torchrun --nproc-per-node 2 -m tests.support.launched RANK:HOW:STEP train CONFIG.yaml ...

HOW: kill, with SIGKILL after the step; kill-in-save or stop-in-save, while the others save it; fail, with a user error
in it; or hang, before its first collective. A rank that torchrun has restarted does not fail again.
"""

from __future__ import annotations

import os
import signal
import sys
import time

from tests.support.train_and_kill import kill_at
from thresher.cli import main
from thresher.errors import UserError
from thresher.training.trainer import RankTrainer


def fail_at(step: int, *, hangs: bool = False) -> None:
    training_step = RankTrainer.training_step

    def fail(self: RankTrainer) -> object:
        if self.state.step + 1 == step:
            if hangs:
                time.sleep(3600)
            raise UserError(f"step {step} fails on purpose")
        return training_step(self)

    RankTrainer.training_step = fail


def signal_in_save(step: int, number: int) -> None:
    save = RankTrainer.save

    def end(self: RankTrainer) -> object:
        saved = save(self)
        if self.state.step == step:
            os.kill(os.getpid(), number)  # before the others hear that this rank has finished the call
        return saved

    RankTrainer.save = end


if __name__ == "__main__":
    rank, how, step = sys.argv.pop(1).split(":")
    is_first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    if is_first and os.environ.get("RANK", os.environ.get("SLURM_PROCID")) == rank:
        if how == "kill":
            kill_at("step", int(step))
        elif how.endswith("-in-save"):
            signal_in_save(int(step), signal.SIGKILL if how == "kill-in-save" else signal.SIGSTOP)
        else:
            fail_at(int(step), hangs=how == "hang")
    main()
