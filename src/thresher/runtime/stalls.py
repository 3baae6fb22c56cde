"""Find workers that are alive but stuck, such as in a collective that a peer never enters: none of them advances."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from thresher.observability.heartbeat import Heartbeat, heartbeat

# polls per timeout; a long timeout has more of them, so that the last known activity is recent
_NUM_POLLS = 8
_MAX_POLL_INTERVAL = 10.0
# progress is seen up to two polls late, and the third is the one that decides
_POLLS_OF_DELAY = 3
# an operation may take this many times as long as the longest before it
_MAX_SLOWDOWN = 2.0


class StallDetector:
    """Decides from the heartbeats of all workers whether the run has stopped to advance.

    Ranks of one step wait for each other, so all of them stop if one does. While any worker advances, such as one
    that scores the reference for the others, the run is not stuck. Polls count, not the clock: after the driver was
    suspended, the workers still have time.
    """

    def __init__(self, timeout: float, interval: float):
        """timeout, interval: seconds until a stuck run must be found, and between two polls."""
        self._allowed = timeout - _POLLS_OF_DELAY * interval
        self._interval = interval
        self._last: tuple[tuple[int, int], ...] = ()
        self._num_polls = 0
        self._longest = 0.0

    def seconds_stuck(self, heartbeats: Sequence[Heartbeat]) -> float | None:
        """Return the seconds without progress if they exceed what is allowed; called once per poll."""
        progress = tuple((each.process, each.progress) for each in heartbeats)
        if progress != self._last or all(each.pace == "unknown" for each in heartbeats):
            self._longest = max(self._longest, self._num_polls * self._interval)
            self._last, self._num_polls = progress, 0
            return None
        self._num_polls += 1
        seconds = self._num_polls * self._interval
        is_allowed = seconds < max(self._allowed, _MAX_SLOWDOWN * self._longest)
        return None if is_allowed or all(each.pace != "steady" for each in heartbeats) else seconds


def poll_interval(timeout: float) -> float:
    """Return the seconds between two polls of processes that must be found stuck within a timeout."""
    return min(timeout / _NUM_POLLS, _MAX_POLL_INTERVAL)


def watch_stalls(timeout: float, when_stuck: Callable[[float], None]) -> Callable[[], None]:
    """Poll this process in a thread that calls `when_stuck` with the seconds without progress; return what ends it."""
    ended, detector = threading.Event(), StallDetector(timeout, poll_interval(timeout))

    def watch() -> None:
        while not ended.wait(poll_interval(timeout)):
            if (seconds := detector.seconds_stuck([heartbeat()])) is not None:
                when_stuck(seconds)
                return

    thread = threading.Thread(target=watch, name="stall watch", daemon=True)
    thread.start()

    def end() -> None:
        ended.set()
        thread.join()  # what `when_stuck` refers to, such as process groups, must not be destroyed in the thread

    return end
