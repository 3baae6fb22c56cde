"""What the kernel says of processes: their memory, and who started whom."""

from __future__ import annotations

from pathlib import Path


def kilobytes(name: str, pid: int | str = "self") -> int:
    """A line of /proc/PID/status, such as VmRSS (resident now) or VmHWM (at the highest)."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))


def descendants(pid: int) -> list[int]:
    """A process and all below it that are there now."""
    found = [pid]
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            direct = children.read_text().split()
        except (FileNotFoundError, ProcessLookupError):  # it has just ended
            continue
        found += [each for child in direct for each in descendants(int(child))]
    return found
