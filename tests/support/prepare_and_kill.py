"""Prepare a store in child processes, each killed with SIGKILL after a number of blocks; the last one completes.

    python -m tests.support.prepare_and_kill OUTPUT LOG SHARD_ROWS EXECUTOR FILES KILL_AT ...

EXECUTOR is `local:N` or `ray:N`; FILES are separated by commas. Each block is logged as its span and last row when its
result arrives. Children are new processes, because Ray does not survive a fork.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.support.small_tokenizer import CHAT_TEMPLATE, make_tokenizer
from thresher.data.prepare.blocks import BlockWorker, SpanTask, TaskReader
from thresher.data.prepare.executor import Executor, Results, local_executor
from thresher.data.prepare.prepare import DataSettings, prepare


def make_executor(name: str) -> Executor:
    kind, _, number = name.partition(":")
    if kind == "local":
        return local_executor(int(number))
    from thresher.runtime.ray.ray_data import run_on_ray

    return run_on_ray(int(number))


def killing(executor: Executor, log: Path, kill_at: int | None) -> Executor:
    def run(worker: BlockWorker, reader: TaskReader, spans: Sequence[SpanTask]) -> Results:
        for number, result in enumerate(executor(worker, reader, spans), start=1):
            with log.open("a") as stream:
                stream.write(f"{result.span} {result.last_number}\n")
            if number == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            yield result

    return run


def prepare_and_kill(output: str, log: str, shard_rows: str, executor: str, files: str, kill_at: str) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    settings = DataSettings(files.split(","), on_bad_row="quarantine", join_labelled=True, shard_rows=int(shard_rows))
    prepare(settings, tokenizer, output, executor=killing(make_executor(executor), Path(log), int(kill_at) or None))


def main(*arguments: str) -> None:
    common, kills = arguments[:5], arguments[5:]
    for kill_at in (*kills, "0"):
        code = subprocess.run(
            [sys.executable, "-m", __spec__.name, "--child", *common, kill_at], check=False
        ).returncode
        if code != (0 if kill_at == "0" else -signal.SIGKILL):
            sys.exit(f"the process to be killed at block {kill_at} exited with {code}")


if __name__ == "__main__":
    if sys.argv[1] == "--child":
        prepare_and_kill(*sys.argv[2:])
    else:
        main(*sys.argv[1:])
