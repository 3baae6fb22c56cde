"""What the kernel says of processes: their memory, and who started whom."""

from __future__ import annotations

from pathlib import Path


def kilobytes(name: str, pid: int | str = "self") -> int:
    """A line of /proc/PID/status, such as VmRSS (resident now) or VmHWM (at the highest)."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))


def resident(pid: int) -> dict[str, int]:
    """Resident kilobytes: all, those that no other process has, and those in shared memory (Ray's object store)."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    sizes = {name: int(rest.split()[0]) for name, rest in (line.split(":", 1) for line in lines)}
    private = sizes["Private_Clean"] + sizes["Private_Dirty"]
    return {"rss": sizes["Rss"], "pss": sizes["Pss"], "private": private, "shared_memory": kilobytes("RssShmem", pid)}


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
