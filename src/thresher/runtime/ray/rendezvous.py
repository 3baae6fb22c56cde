"""How the ranks of a cluster find each other: one listens at an address that it chose itself, all meet there."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import psutil
import ray
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from thresher.distributed.groups import Group

Address = tuple[str, int]
# a peer that died is noticed by the driver at once; this is for one that hangs
_PEER_TIMEOUT = timedelta(minutes=30)


def start_rendezvous(size: int) -> tuple[TCPStore, Address]:
    """Listen on this node's own address and a free port; the socket is bound before anybody hears of it."""
    host = ray.util.get_node_ip_address()
    listener = socket.create_server((host, 0), backlog=max(128, size))
    port = listener.getsockname()[1]
    store = TCPStore(host, port, size, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    return store, (host, port)


def init_process_group(rank: int, size: int, address: Address, store: TCPStore | None) -> Group:
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
    """Name the network interface that has this address; None where no interface of this machine has it."""
    every = psutil.net_if_addrs().items()
    return next((name for name, own in every if address in {each.address for each in own}), None)
