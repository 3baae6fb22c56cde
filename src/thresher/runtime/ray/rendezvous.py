"""Rendezvous of the ranks of a cluster: one rank hosts a TCPStore on a free port, and all ranks connect to it."""

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
# for a peer that hangs; the driver notices a dead one immediately
_PEER_TIMEOUT = timedelta(minutes=30)


def start_rendezvous(size: int) -> tuple[TCPStore, Address]:
    """Host a TCPStore on this node's address; the socket is bound here, so that its port cannot be taken meanwhile."""
    host = ray.util.get_node_ip_address()
    listener = socket.create_server((host, 0), backlog=max(128, size))
    port = listener.getsockname()[1]
    store = TCPStore(host, port, size, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    return store, (host, port)


def init_process_group(rank: int, size: int, address: Address, store: TCPStore | None) -> Group:
    """Join the process group of all ranks; store is the TCPStore that this rank hosts, if it does."""
    host, port = address
    interface = _interface_of(ray.util.get_node_ip_address())
    if interface is not None:
        # the default is the address that the host name resolves to, which may be loopback on a cluster, or the reverse
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
    """Return the name of the network interface with this address, None if there is no such interface."""
    interfaces = psutil.net_if_addrs().items()
    return next((name for name, addresses in interfaces if address in {each.address for each in addresses}), None)
