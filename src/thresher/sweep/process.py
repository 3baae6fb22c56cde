"""A trial as its records: those that are in its log already, then those of a process that resumes the run.

Whatever was interrupted, the records of a trial are the same, because a resumed run logs the same values.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thresher.checkpoint.manager import list_checkpoints
from thresher.checkpoint.save import step_of
from thresher.observability.log_files import METRICS
from thresher.observability.trackers.jsonl import read_metrics
from thresher.sweep.child import CONTINUE, STOP
from thresher.sweep.trial_end import State, TrialEnd, read_end, write_end
from thresher.training.run_lock import wait_until_unlocked

# a trial of a killed sweep ends as soon as its parent has ended
_SECONDS_FOR_AN_OLD_PROCESS = 60.0
_SECONDS_BETWEEN_CHECKS = 0.5
_OUTPUT = "output.log"


@dataclass(frozen=True)
class TrialRequest:
    """What the process of a trial needs; paths are absolute.

    metric: only records with this metric are reported. environment: the names of the variables that the process gets,
    which excludes those that Ray adds. threads: OMP_NUM_THREADS, unless it is set. interrupt_file: exists if the whole
    sweep has to stop.
    """

    config: str
    name: str
    overrides: tuple[str, ...]
    directory: Path
    log_dir: Path
    working_dir: Path
    metric: str
    environment: frozenset[str]
    threads: int | None
    interrupt_file: Path


class TrialRun:
    """The records of one trial, in order. Its process waits after each record until the next one is asked for."""

    def __init__(self, request: TrialRequest) -> None:
        self._request = request
        self._process: subprocess.Popen[str] | None = None
        self._has_ended = False
        self._last_step = -1
        self._records = self._iterate()

    def next_record(self) -> dict[str, float] | None:
        """Return the next `step` and `value` of the metric; None at the end of the run."""
        return next(self._records, None)

    def close(self) -> None:
        """Stop a run that has not ended: after its next step, with a checkpoint."""
        if self._has_ended:
            return
        self._records.close()
        if self._process is None:
            saved = self._saved_step()
            if saved is not None and saved > self._last_step:  # it stopped, and the sweep was killed then
                self._end("stopped early")
                return
            self._start(stops=True)
        else:
            self._answer(STOP)
        for _ in self._messages():
            self._answer(CONTINUE)

    def _iterate(self) -> Generator[dict[str, float], None, None]:
        request, end = self._request, read_end(self._request.directory)
        log, saved = request.log_dir / METRICS, self._saved_step()
        for record in read_metrics(log) if saved is not None and log.is_file() else ():
            if record["step"] <= saved and (found := self._reported(record)) is not None:
                yield found
        if end is not None and end.is_final:
            self._has_ended = True
            return
        if request.interrupt_file.exists():
            self._end("interrupted")
            return
        self._start()
        for _ in self._messages():
            if (found := self._reported(_last_record(log))) is not None:
                yield found
            self._answer(CONTINUE)

    def _reported(self, record: dict[str, Any]) -> dict[str, float] | None:
        """Return what to report of a record; None without the metric, or if it was reported before a resume."""
        if self._request.metric not in record or record["step"] <= self._last_step:
            return None
        self._last_step = record["step"]
        return {"step": record["step"], "value": float(record[self._request.metric])}

    def _saved_step(self) -> int | None:
        steps = [step_of(path) for path in list_checkpoints(self._request.directory / "checkpoints")]
        return steps[-1] if steps else None

    def _start(self, *, stops: bool = False) -> None:
        request = self._request
        request.directory.mkdir(parents=True, exist_ok=True)
        wait_until_unlocked(request.directory, _SECONDS_FOR_AN_OLD_PROCESS)
        environment = {name: value for name, value in os.environ.items() if name in request.environment}
        if devices := os.environ.get("CUDA_VISIBLE_DEVICES"):  # those that Ray assigned to the trial
            environment["CUDA_VISIBLE_DEVICES"] = devices
        if request.threads is not None:
            environment.setdefault("OMP_NUM_THREADS", str(request.threads))
        with (request.directory / _OUTPUT).open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "thresher.sweep.child"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                cwd=request.working_dir,
                env=environment,
                text=True,
                start_new_session=True,  # Ctrl-C in a terminal goes to the sweep alone, which stops its trials
            )
        wanted = {"config": request.config, "name": request.name, "overrides": request.overrides, "stops": stops}
        self._answer(json.dumps(wanted))

    def _answer(self, line: str) -> None:
        assert self._process is not None  # noqa: S101
        assert self._process.stdin is not None  # noqa: S101
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:  # the process has died, which the end of its messages shows
            pass

    def _messages(self) -> Iterator[int]:
        """Yield the step of each record that the process logs, until its last message, which is stored."""
        process = self._process
        assert process is not None  # noqa: S101
        assert process.stdout is not None  # noqa: S101
        is_interrupted = False
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while True:
                if not is_interrupted and self._request.interrupt_file.exists():
                    is_interrupted = True
                    process.send_signal(signal.SIGTERM)  # finishes the current step and saves it
                if not selector.select(_SECONDS_BETWEEN_CHECKS):
                    continue
                line = process.stdout.readline()
                if not line:
                    self._end("failed", f"its process ended with code {process.wait()}; see {_OUTPUT}")
                    return
                message = json.loads(line)
                if "end" in message:
                    process.wait()
                    stopped: State = "interrupted" if is_interrupted else "stopped early"
                    self._end(stopped if message["end"] == "stopped" else message["end"], message["message"])
                    return
                yield message["step"]

    def _end(self, state: State, message: str = "") -> None:
        self._has_ended = True
        self._request.directory.mkdir(parents=True, exist_ok=True)
        write_end(self._request.directory, TrialEnd(state, message))


def open_trial(requests: Sequence[TrialRequest], index: int) -> TrialRun:
    """Open the trial with a number; called in the actor of the trial."""
    return TrialRun(requests[index])


def _last_record(log: Path) -> dict[str, Any]:
    return read_metrics(log)[-1]
