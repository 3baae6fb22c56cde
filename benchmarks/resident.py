"""What the kernel says of a process's memory."""

from __future__ import annotations

from pathlib import Path


def kilobytes(name: str, pid: int | str = "self") -> int:
    """A line of /proc/PID/status, such as VmRSS (resident now) or VmHWM (at the highest)."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))
