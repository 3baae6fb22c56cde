"""Run a config in child processes, each killed with SIGKILL at a chosen moment, the last one to its end.

    python -m tests.support.train_and_kill CONFIG.yaml OUTPUT_DIR MOMENT:STEP ...

Moments: step (weights updated, nothing logged), logged, evaluated, saving (half a checkpoint written, while the
next steps are trained), saved (published), and scoring, whose number counts the blocks of pairs that the reference has
scored, two per shard. Children are forked before any tensor exists: fresh processes without importing torch again.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from thresher.checkpoint.save import Write
from thresher.config import load_config
from thresher.observability.trackers.tracker import Trackers
from thresher.pipeline import DPOPipeline
from thresher.training.trainer import RankTrainer

PATCHED = {"step": "training_step", "saved": "save"}
LOGGED = {"logged": "loss", "evaluated": "eval/loss"}


def kill_at(moment: str, step: int) -> None:
    """Make this process kill itself at a moment of a step."""
    if moment == "saving":
        from thresher.engines.engine import TrainEngine

        capture = TrainEngine.snapshot

        def capture_and_die(self: TrainEngine, *arguments: object) -> Write:
            write = capture(self, *arguments)

            def write_and_die(directory: Path) -> Sequence[str]:
                names = write(directory)
                if int(directory.name.split("-")[2]) == step:
                    os.kill(os.getpid(), signal.SIGKILL)
                return names

            return write_and_die

        TrainEngine.snapshot = capture_and_die
        return
    if moment in LOGGED:
        log = Trackers.log

        def log_and_die(self: Trackers, at: int, metrics: dict[str, float]) -> None:
            log(self, at, metrics)
            if at == step and LOGGED[moment] in metrics:
                os.kill(os.getpid(), signal.SIGKILL)

        Trackers.log = log_and_die
        return
    if moment == "scoring":
        kill_while_scoring(step)
        return
    method = getattr(RankTrainer, PATCHED[moment])

    def act_and_die(self: RankTrainer) -> object:
        result = method(self)
        if self.state.step == step:
            if moment == "saved":
                self.wait_for_saves()
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(RankTrainer, PATCHED[moment], act_and_die)


def kill_while_scoring(block: int) -> None:
    """Kill this process after `block` blocks; every second block ends a shard, as if it were full."""
    from thresher.reference.cache import ShardWriter

    end_block, num_blocks = ShardWriter.end_block, 0

    def end_block_and_die(self: ShardWriter) -> None:
        nonlocal num_blocks
        num_blocks += 1
        if num_blocks % 2 == 0:
            self._flush()
        end_block(self)
        if num_blocks == block:
            os.kill(os.getpid(), signal.SIGKILL)

    ShardWriter.end_block = end_block_and_die


def run_child(config_path: str, output_dir: str, kill: str | None) -> int:
    """Fork, run, and return the wait status."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            if kill is not None:
                moment, step = kill.split(":")
                kill_at(moment, int(step))
            config = load_config(config_path, [f"output_dir={output_dir}", "resume_from_checkpoint=auto"])
            logging.basicConfig(level=logging.INFO, format="%(message)s")
            DPOPipeline(config).run()
            code = 0
        except Exception:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    return os.waitpid(pid, 0)[1]


def main(config_path: str, output_dir: str, *kills: str) -> None:
    for kill in kills:
        status = run_child(config_path, output_dir, kill)
        if not (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL):
            sys.exit(f"the run to be killed at {kill} ended with status {status}")
    status = run_child(config_path, output_dir, None)
    if status != 0:
        sys.exit(f"the last run ended with status {status}")


if __name__ == "__main__":
    main(*sys.argv[1:])
