"""Ports of this machine: free ones, and those on which something listens."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path


def free_ports(count: int = 1) -> list[int]:
    """Ports that were free a moment ago."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in sockets]


def listening() -> dict[str, str]:
    """Address and port of every listening socket on this machine, by socket."""
    rows = [row.split() for name in ("tcp", "tcp6") for row in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return {f"socket:[{row[9]}]": row[1] for row in rows if row[3] == "0A"}
