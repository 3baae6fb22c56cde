"""Fill a cache in child processes; each is killed with SIGKILL at a chosen forward, except the last.

    python -m tests.support.score_and_kill CACHE_DIR LOG NUM_PAIRS SHARD_BYTES KILL_AT ...

The first pair id of a block is logged before its forward. Children are forked, as in train_and_kill.py.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from tests.support.noise_cache import NoisePairs, lookup, synthetic_logps
from thresher.data.example import ExampleBatch
from thresher.losses.pairs import ExampleLogps
from thresher.reference import cache


def score_and_die(root: Path, log: Path, num_pairs: int, kill_at: int | None) -> None:
    num_forwards = 0

    def score(batch: ExampleBatch) -> ExampleLogps:
        nonlocal num_forwards
        num_forwards += 1
        with log.open("a") as stream:
            stream.write(f"{batch.pair_ids[0]}\n")
        if num_forwards == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return synthetic_logps(batch)

    list(lookup(root, NoisePairs(num_pairs)).iter_score_missing(score))


def main(root: str, log: str, num_pairs: str, shard_bytes: str, *kills: str) -> None:
    cache.SHARD_BYTES = int(shard_bytes)
    for kill_at in [*map(int, kills), None]:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                score_and_die(Path(root), Path(log), int(num_pairs), kill_at)
                code = 0
            finally:
                os._exit(code)
        status = os.waitpid(pid, 0)[1]
        if kill_at is None and status != 0:
            sys.exit(f"the last process ended with status {status}")
        if kill_at is not None and not (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL):
            sys.exit(f"the process to be killed at forward {kill_at} ended with status {status}")


if __name__ == "__main__":
    main(*sys.argv[1:])
