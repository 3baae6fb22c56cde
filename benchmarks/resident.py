"""Process information from the kernel: memory, children, titles."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def kilobytes(name: str, pid: int | str = "self") -> int:
    """Read a field of /proc/PID/status, such as VmRSS (resident now) or VmHWM (peak)."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))


def descendants(pid: int) -> list[int]:
    """Return a process and all its live descendants."""
    found = [pid]
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            direct = children.read_text().split()
        except (FileNotFoundError, ProcessLookupError):  # it has just exited
            continue
        found += [each for child in direct for each in descendants(int(child))]
    return found


def titles(pid: int) -> Iterator[tuple[int, str]]:
    """Yield a process and its descendants with their titles; Ray sets the title to the class of a worker."""
    for each in descendants(pid):
        try:
            yield each, Path(f"/proc/{each}/cmdline").read_bytes().split(b"\0")[0].decode()
        except OSError:  # it has just exited
            continue


def has_title(title: str, name: str) -> bool:
    """Return whether a title belongs to this worker class or program."""
    return title.startswith(name) or title.endswith(f"/{name}")
