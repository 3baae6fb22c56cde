"""Graceful shutdown: SIGTERM and SIGINT create a stop file; all ranks stop after the current step and save.

Rank 0 of the policy checks the file and broadcasts the decision, so that all ranks stop after the same step (see
`RankTrainer`). Running the same command again resumes from the checkpoint of that step.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from thresher.errors import RescaleRequested, RunStopped, WorkerError, WorkerLostError

logger = logging.getLogger(__name__)

FILE_NAME = "stop"


@contextmanager
def stop_on_signals(file: Path, deadline: float) -> Iterator[None]:
    """Create the file on the first SIGTERM or SIGINT; exit immediately on a second one or after `deadline` seconds.

    After a signal, a failure ends the run instead of restarting it: the sender may have ended the workers as well.
    """
    if threading.current_thread() is not threading.main_thread():  # only the main thread can install handlers
        yield
        return
    received: list[int] = []
    timers: list[threading.Timer] = []

    def on_signal(number: int, _frame: FrameType | None) -> None:
        if received:
            raise SystemExit(128 + number)
        received.append(number)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
        timers.append(threading.Timer(deadline, os._exit, (128 + number,)))
        timers[0].daemon = True
        timers[0].start()
        logger.warning(
            "%s: finishing and saving the current step (up to %.0f s); send the signal again to exit immediately",
            signal.Signals(number).name,
            deadline,
        )

    previous = {number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
        file.unlink(missing_ok=True)
    except RunStopped as stopped:
        file.unlink(missing_ok=True)
        if received:
            stopped.exit_code = 128 + received[0]
        raise
    except (WorkerLostError, WorkerError, RescaleRequested) as error:
        if not received:
            raise
        file.unlink(missing_ok=True)
        raise RunStopped(None, 128 + received[0]) from error
    finally:
        for timer in timers:
            timer.cancel()
        for number, handler in previous.items():
            signal.signal(number, handler)
