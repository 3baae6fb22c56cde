"""Runtime for a run whose processes torchrun or srun started: rank 0 leads, the other ranks follow.

Rank 0 runs the pipeline as the driver of a Ray run does: it prepares pairs, logs, tracks and decides. Each call of its
`LaunchedRanks` is executed by rank 0 itself, and by the other ranks, which wait for calls in `LaunchSession.follow`.
Secrets of the config are not sent: each rank has read them itself.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch._C._distributed_c10d import PrefixStore, Store

from thresher.builders.preflight.machine import check_clocks, check_node
from thresher.builders.reference_mode import ReferenceMode
from thresher.config import DPOConfig, parse_config
from thresher.distributed.groups import PEER_TIMEOUT
from thresher.redact import MASK, redact
from thresher.runtime.devices import CPU, claim_gpu, init_process_group, uses_cpu_instead
from thresher.runtime.group import Runtime, with_absolute_cache_dir
from thresher.runtime.launch import Launch
from thresher.runtime.launch_session import LaunchSession, Values, current_session
from thresher.runtime.launch_store import is_loopback
from thresher.runtime.rank import PolicyRank

logger = logging.getLogger(__name__)

_ROLE = "actor_train"
T = TypeVar("T")


class LaunchedRank(PolicyRank):
    """A rank of the policy in a process that the launcher started."""

    def __init__(self, launch: Launch, store: Store):
        super().__init__(launch.rank, launch.size, CPU)
        self._launch, self._store = launch, store
        self._warnings: list[str] = []  # about this machine

    def receive(self, values: Values) -> None:
        """Set the environment of a config, open the log of a follower, and find the device."""
        config = parse_config(dict(values))
        environment = config.environment_of(_ROLE)
        os.environ.update(environment)
        log_dir = config.log_dir.resolve()
        self._device = device_of_rank(self._launch, config)
        if self._rank and (warning := self.open_log(log_dir, _ROLE, logging.INFO, sorted(environment))):
            logger.error("%s", warning)
        if self._launch.local_rank == 0:  # one rank per node
            self._warnings = [str(each) for each in check_node(config, uses_gpu=self._device.type == "cuda")]
            for warning in self._warnings:  # also if the process group fails by it
                logger.warning("%s", warning)
        self.open(config, log_dir)

    def join(self) -> int:
        """Join the process group; return the number of nodes."""
        store = PrefixStore("process group", self._store)
        address = address_among_ranks(store, self._launch)
        self._world = init_process_group(self._rank, self._size, store, address, self._device)
        hosts = self._world.all_gather_object(socket.gethostname())
        clocks = self._world.all_gather_object(time.time())  # all ranks are here at the same time
        warnings = self._world.all_gather_object(self._warnings)
        if self._rank == 0:
            offsets = {host: clock - clocks[0] for host, clock in zip(hosts, clocks, strict=True)}
            others = itertools.chain.from_iterable(warnings[1:])  # this rank has shown its own
            for warning in (*others, *check_clocks(offsets, hosts[0])):
                logger.warning("%s", warning)
        return len(set(hosts))


class LaunchedRanks:
    """All ranks of a launched run, called by rank 0, which is one of them."""

    def __init__(self, session: LaunchSession, values: Values):
        """Open a config on all ranks; the others add their own secrets to it."""
        self._session = session
        self._rank = LaunchedRank(session.launch, session.store)
        self._num_nodes = 0  # until the ranks have joined the process group
        with session.on_all("receive", _without_secrets(values)):
            self._rank.receive(values)
            session.watch(self._rank)

    def __len__(self) -> int:
        return self._session.launch.size

    @property
    def num_nodes(self) -> int:
        """The number of nodes; the ranks join the process group with the first use."""
        if not self._num_nodes:
            with self._session.on_all("join"):
                self._num_nodes = self._rank.join()
        return self._num_nodes

    def on_all(self, method: Callable[..., T], *arguments: object) -> T:
        _ = self.num_nodes
        with self._session.on_all(method.__name__, *arguments):
            return method(self._rank, *arguments)

    def stream(self, method: Callable[..., Iterator[T]], *arguments: object) -> Iterator[T]:
        with self._session.on_all(method.__name__, *arguments):
            yield from method(self._rank, *arguments)


def open_torchrun_runtime(config: DPOConfig, mode: ReferenceMode) -> Runtime:
    """Find the devices of all ranks."""
    session = current_session()
    logger.info("runtime torchrun: %s started %d processes", session.launch.launcher, session.launch.size)
    config = with_absolute_cache_dir(config, mode)
    return Runtime(config, LaunchedRanks(session, config.model_dump(mode="json", exclude_unset=True)))


def device_of_rank(launch: Launch, config: DPOConfig) -> torch.device:
    """Return the GPU of a rank: the mapped one, else the one with its local rank; the CPU if there is none."""
    count, mapping = torch.cuda.device_count(), config.actor_train.device_mapping
    if uses_cpu_instead() or (not count and not mapping):
        return CPU
    if mapping:  # ids count on from node to node
        index = mapping[launch.rank] % (config.num_gpus_per_node or max(1, count))
    else:
        index = launch.local_rank if count > 1 else 0  # Slurm can show each task its own GPU alone
    return claim_gpu(f"rank {launch.rank} of {launch.size}", index)


def address_among_ranks(store: Store, launch: Launch) -> str:
    """Return the address of this node in the network of all ranks; empty if there is no way to it."""
    address = _local_address(*launch.master)
    names = [f"address/{rank}" for rank in range(launch.size)]
    store.set(names[launch.rank], address)
    if not is_loopback(address):
        return address
    # the node of rank 0 often resolves its own name to loopback: its address is the one on the way to another node
    store.wait(names, PEER_TIMEOUT)
    others = [text for value in store.multi_get(names) if (text := value.decode()) and not is_loopback(text)]
    return _local_address(others[0], launch.master[1]) if others else address


def _local_address(host: str, port: int) -> str:
    """Return the address of this machine in the network of another one; empty if there is no way to it."""
    with contextlib.suppress(OSError):
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # sends nothing
            return str(probe.getsockname()[0])
    return ""


def _without_secrets(values: Values) -> dict[str, Any]:
    """Return a config as it is sent: variables of the environment are private, whatever their names."""
    shown = redact(values)
    for section in (shown, shown.get("actor_train", {}), shown.get("reference", {})):
        section |= {"system_envs": dict.fromkeys(section["system_envs"], MASK)} if "system_envs" in section else {}
    return shown
