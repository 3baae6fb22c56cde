"""One trial as a `thresher train` process, and the values that it logs.

A process inside the actor that Tune starts for the trial, because a run handles signals in its main thread and may
start its own Ray cluster.
"""

from __future__ import annotations

import math
import os
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thresher.errors import HealthStopped
from thresher.observability.trackers.jsonl import read_metrics
from thresher.sweep.results import TrialEnd, read_end, write_end
from thresher.training.run_lock import wait_until_unlocked

_OUTPUT = "output.log"
_SECONDS_BETWEEN_CHECKS = 0.5
_SECONDS_FOR_AN_OLD_PROCESS = 60.0  # of a sweep that was killed


@dataclass(frozen=True)
class TrialRequest:
    """The command that runs a trial, and its files, as absolute paths."""

    command: list[str]
    environment: Mapping[str, str]
    working_dir: Path
    directory: Path
    log: Path
    metric: str
    interrupt_file: Path  # exists if the whole sweep has to stop


class TrialProcess:
    """A trial's process, started unless the trial has ended; the values that it logged earlier are reported again."""

    def __init__(self, request: TrialRequest) -> None:
        self._request = request
        self._log_state: tuple[int, int] | None = None
        self._last = {"step": 0, "value": math.nan}
        self._process: subprocess.Popen[bytes] | None = None
        end = read_end(request.directory)
        if (end is not None and end.is_final) or request.interrupt_file.exists():
            return
        request.directory.mkdir(parents=True, exist_ok=True)
        wait_until_unlocked(request.directory, _SECONDS_FOR_AN_OLD_PROCESS)
        devices = os.environ.get("CUDA_VISIBLE_DEVICES")  # assigned by Ray
        with (request.directory / _OUTPUT).open("wb") as output:
            self._process = subprocess.Popen(
                request.command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=request.working_dir,
                env={**request.environment, **({"CUDA_VISIBLE_DEVICES": devices} if devices else {})},
                start_new_session=True,  # Ctrl-C in a terminal reaches the sweep alone, which stops its trials
            )

    def next_result(self) -> dict[str, Any]:
        """Wait for the next `step` and `value` of the metric; after the last one, return it again, with `done`."""
        while True:
            is_running = self._process is not None and self._process.poll() is None
            for record in self._new_records():
                if record["step"] > self._last["step"] and self._request.metric in record:
                    self._last = {"step": record["step"], "value": record[self._request.metric]}
                    return dict(self._last)
            if self._process is None or not is_running:
                self._record_end()
                return {**self._last, "done": True}
            if self._request.interrupt_file.exists():
                self._process.terminate()  # the run saves its last step
                self._process.wait()
            time.sleep(_SECONDS_BETWEEN_CHECKS)

    def stop(self) -> None:
        """Stop the run after its current step, with a checkpoint."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            if not self._request.interrupt_file.exists():
                # before the run has ended: when the sweep ends, Tune waits for 10 s only
                write_end(self._request.directory, TrialEnd("stopped early"))
            self._process.wait()

    def _new_records(self) -> Iterator[dict[str, Any]]:
        log = self._request.log
        if not log.is_file():
            return
        stat = log.stat()
        if self._log_state != (stat.st_ino, stat.st_size):
            yield from read_metrics(log)  # from its start, because a resumed run truncates its log
            self._log_state = stat.st_ino, stat.st_size  # not reached if the caller stops at a record

    def _record_end(self) -> None:
        if self._process is None:
            return
        text = (self._request.directory / _OUTPUT).read_text(encoding="utf-8", errors="replace").strip()
        match self._process.returncode:
            case 0:
                end = TrialEnd("finished")
            case HealthStopped.EXIT_CODE:
                end = TrialEnd("stopped by health", text.rpartition("\n")[2])
            case _ if self._request.interrupt_file.exists():
                end = TrialEnd("interrupted")
            case 2:
                end = TrialEnd("failed", text.rpartition("error: ")[2])
            case code:
                end = TrialEnd("failed", f"exit code {code}; see {_OUTPUT}")
        write_end(self._request.directory, end)
