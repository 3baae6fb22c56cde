"""Rendezvous of the ranks of a cluster: one rank hosts a TCPStore on a free port, and all ranks connect to it."""

from __future__ import annotations

import socket

import ray
import torch
from torch._C._distributed_c10d import TCPStore

from thresher.distributed.groups import Group
from thresher.runtime import process_group

Address = tuple[str, int]


def start_rendezvous(size: int) -> tuple[TCPStore, Address]:
    """Host a TCPStore on this node's address; the socket is bound here, so that its port cannot be taken meanwhile."""
    host = ray.util.get_node_ip_address()
    listener = socket.create_server((host, 0), backlog=max(128, size))
    port = listener.getsockname()[1]
    store = TCPStore(host, port, size, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    return store, (host, port)


def init_process_group(rank: int, size: int, address: Address, store: TCPStore | None, device: torch.device) -> Group:
    """Join the process group of all ranks; store is the TCPStore that this rank hosts, if it does."""
    host, port = address
    store = store or TCPStore(host, port, size, is_master=False)
    return process_group.init_process_group(rank, size, store, ray.util.get_node_ip_address(), device)
