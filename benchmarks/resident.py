"""What the kernel says of processes: their memory, and who started whom."""

from __future__ import annotations

from collections.abc import Iterator
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


def titles(pid: int) -> Iterator[tuple[int, str]]:
    """A process and all below it, each with its title: Ray writes the class of a worker there."""
    for each in descendants(pid):
        try:
            yield each, Path(f"/proc/{each}/cmdline").read_bytes().split(b"\0")[0].decode()
        except OSError:  # it has just ended
            continue


def has_title(title: str, name: str) -> bool:
    """Say if a title is that of a worker or of a program in some directory."""
    return title.startswith(name) or title.endswith(f"/{name}")
