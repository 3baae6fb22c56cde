"""Wall times and rates of the phases of a step, as the host sees them.

Work queued on a device counts for the phase that waits for it; who wants a phase's device time synchronises
before it ends.
"""

import contextlib
import time
from collections.abc import Callable, Iterator


class Timings:
    """Add up named wall times and counts between two `drain` calls."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._seconds: dict[str, float] = {}
        self._counts: dict[str, float] = {}
        self._drained_at = clock()

    @contextlib.contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Add the time that the block takes, also when it raises, to `time/<name>`."""
        begin = self._clock()
        try:
            yield
        finally:
            self.add(name, self._clock() - begin)

    def add(self, name: str, seconds: float) -> None:
        """Add a time that was measured elsewhere."""
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def count(self, name: str, amount: float) -> None:
        """Count work done; it comes out as `<name>_per_second` of all the time since the last `drain`."""
        self._counts[name] = self._counts.get(name, 0.0) + amount

    def drain(self) -> dict[str, float]:
        """Give the metrics since the last call and begin anew. `time/total` is all the time in between."""
        now = self._clock()
        total = now - self._drained_at
        metrics = {f"time/{name}": seconds for name, seconds in self._seconds.items()}
        metrics["time/total"] = total
        if total > 0:
            metrics |= {f"{name}_per_second": amount / total for name, amount in self._counts.items()}
        self._seconds, self._counts, self._drained_at = {}, {}, now
        return metrics
