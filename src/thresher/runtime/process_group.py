"""The process group of all ranks of a role, over a store that they share."""

from __future__ import annotations

import os

import psutil
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from thresher.distributed.groups import PEER_TIMEOUT, Group
from thresher.runtime.devices import check_same_device_type


def init_process_group(rank: int, size: int, store: Store, address: str, device: torch.device) -> Group:
    """Join the process group; address is this node's own in the network of the ranks."""
    check_same_device_type(store, rank, size, device, PEER_TIMEOUT)
    interface = _interface_of(address)
    if interface is not None:
        # the default is the address that the host name resolves to, which may be loopback on a cluster, or the reverse
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
    is_gpu = device.type == "cuda"
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if is_gpu else "gloo",
        store=store,
        rank=rank,
        world_size=size,
        timeout=PEER_TIMEOUT,
        device_id=device if is_gpu else None,  # NCCL connects now, and never guesses the GPU of a rank
    )
    return Group(rank, size, dist.group.WORLD)


def _interface_of(address: str) -> str | None:
    """Return the name of the network interface with this address, None if there is no such interface."""
    interfaces = psutil.net_if_addrs().items()
    return next((name for name, addresses in interfaces if address in {each.address for each in addresses}), None)
