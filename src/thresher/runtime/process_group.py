"""How the ranks of a cluster find each other: one listens at an address that it chose itself, all meet there."""

from __future__ import annotations

import ipaddress
import os
import socket
from datetime import timedelta

import ray
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from thresher.strategies.ranks import DataRanks

Address = tuple[str, int]
# a peer that died is noticed by the driver at once; this is for one that hangs
_PEER_TIMEOUT = timedelta(minutes=30)


def host_meeting(size: int) -> tuple[TCPStore, Address]:
    """Listen on this node's own address and a free port; the socket is bound before anybody hears of it."""
    host = ray.util.get_node_ip_address()
    listener = socket.create_server((host, 0), backlog=max(128, size))
    port = listener.getsockname()[1]
    store = TCPStore(host, port, size, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    return store, (host, port)


def join_group(rank: int, size: int, address: Address, store: TCPStore | None) -> DataRanks:
    """Meet the other ranks; store is the one that this rank hosts, None on the others."""
    host, port = address
    if ipaddress.ip_address(host).is_loopback:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # gloo would listen on the host's outer address
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(
        backend,
        store=store or TCPStore(host, port, size, is_master=False),
        rank=rank,
        world_size=size,
        timeout=_PEER_TIMEOUT,
    )
    return DataRanks(rank, size, dist.group.WORLD)
