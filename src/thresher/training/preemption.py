"""Leave in good order: a file that asks a run to stop, and signals that write it.

SIGTERM (preemption) and SIGINT ask the ranks to stop after the step that they are in; a checkpoint of that step is
saved, and the same command goes on from there. Who looks at the file is the first process of the policy, wherever it
runs; all others learn it from that one at the same step.
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
    """Turn the first SIGTERM or SIGINT into the file; after a second one, or after the deadline, leave at once.

    A run that was asked to stop does not go on after a failure: what asked it may have ended its workers as well.
    """
    if threading.current_thread() is not threading.main_thread():  # signals reach the main thread alone
        yield
        return
    asked: list[int] = []
    timers: list[threading.Timer] = []

    def ask(number: int, _frame: FrameType | None) -> None:
        if asked:
            raise SystemExit(128 + number)
        asked.append(number)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
        timers.append(threading.Timer(deadline, os._exit, (128 + number,)))
        timers[0].daemon = True
        timers[0].start()
        name = signal.Signals(number).name
        logger.warning(
            "%s: the step that is under way is finished and saved, within %.0f s; once more to leave at once",
            name,
            deadline,
        )

    before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
        file.unlink(missing_ok=True)
    except RunStopped as stopped:
        file.unlink(missing_ok=True)
        if asked:
            stopped.exit_code = 128 + asked[0]
        raise
    except (WorkerLostError, WorkerError, RescaleRequested) as error:
        if not asked:
            raise
        file.unlink(missing_ok=True)
        raise RunStopped(None, 128 + asked[0]) from error
    finally:
        for timer in timers:
            timer.cancel()
        for number, handler in before.items():
            signal.signal(number, handler)
