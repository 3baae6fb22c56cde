"""How the ranks of a cluster find each other: one listens at an address that it chose itself, all meet there."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
from datetime import timedelta

import ray
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from thresher.strategies.ranks import Group

Address = tuple[str, int]
# a peer that died is noticed by the driver at once; this is for one that hangs
_PEER_TIMEOUT = timedelta(minutes=30)
_SIOCGIFADDR = 0x8915  # Linux: ask for an interface's address


def host_meeting(size: int) -> tuple[TCPStore, Address]:
    """Listen on this node's own address and a free port; the socket is bound before anybody hears of it."""
    host = ray.util.get_node_ip_address()
    listener = socket.create_server((host, 0), backlog=max(128, size))
    port = listener.getsockname()[1]
    store = TCPStore(host, port, size, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    return store, (host, port)


def join_group(rank: int, size: int, address: Address, store: TCPStore | None) -> Group:
    """Meet the other ranks; store is the one that this rank hosts, None on the others."""
    host, port = address
    interface = _interface_of(ray.util.get_node_ip_address())
    if interface is not None:
        # both would take what the host's name resolves to, which may be loopback where it must not, or the other way
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(
        backend,
        store=store or TCPStore(host, port, size, is_master=False),
        rank=rank,
        world_size=size,
        timeout=_PEER_TIMEOUT,
    )
    return Group(rank, size, dist.group.WORLD)


def _interface_of(address: str) -> str | None:
    """Name the network interface that has this IPv4 address; None where the system does not say."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an address
                answer = fcntl.ioctl(asking, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None
