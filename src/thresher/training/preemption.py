"""Graceful shutdown: SIGTERM and SIGINT create a stop file; all ranks stop after the same step and save it.

Rank 0 of the policy checks the file and broadcasts the decision with the results of the step (see `RankTrainer`). One
process alone also checks it between the micro-batches of a slow step, and discards that step. Running the same command
again resumes from the checkpoint.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from thresher.errors import RescaleRequested, RunStopped, WorkerError, WorkerLostError

logger = logging.getLogger(__name__)

# for the last message: a lock of a handler or of the terminal may be held forever
_SECONDS_TO_REPORT = 5.0


@contextmanager
def stop_on_signals(file: Path, deadline: float, before_exit: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Create the file on the first SIGTERM or SIGINT; exit immediately on a second one or after `deadline` seconds.

    At the deadline, before_exit is called in a thread, to say what was not saved.
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
        timers.append(threading.Timer(deadline, _exit, (128 + number, before_exit)))
        timers[0].daemon = True
        timers[0].start()
        logger.warning(
            "%s: stopping and saving (up to %.0f s); send the signal again to exit immediately",
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


def _exit(code: int, before_exit: Callable[[], object]) -> None:
    report = threading.Thread(target=before_exit, daemon=True)
    report.start()
    report.join(_SECONDS_TO_REPORT)
    os._exit(code)
