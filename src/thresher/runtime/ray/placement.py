"""Placement: assign a node and a fraction of a device to each worker, as a pure function of nodes and requests.

Elastic scaling reduces the workers of a config to the nodes that are available.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from thresher.config import DPOConfig
from thresher.config.roles import RoleConfig
from thresher.errors import ResourceError


@dataclass(frozen=True)
class Node:
    """A node of the Ray cluster."""

    node_id: str
    address: str
    num_cpus: float
    num_gpus: int


@dataclass(frozen=True)
class WorkerPlacement:
    """The node and resources of one worker."""

    node: Node
    owner: str
    bundle: int  # index into the resource bundles of the role `owner`; roles that share a device share its bundle
    device: int | None
    num_gpus: float
    num_cpus: float  # reserved cores
    threads: int  # that compute


def place_roles(
    nodes: Sequence[Node], roles: Mapping[str, RoleConfig], devices_per_node: int | None, *, concurrent: bool
) -> dict[str, list[WorkerPlacement]]:
    """Place every worker of every role, or raise if the cluster lacks the resources."""
    assigned = {name: _assign_nodes(nodes, name, role, devices_per_node) for name, role in roles.items()}
    on_node = Counter(node.node_id for workers in assigned.values() for node, _ in workers)
    sharers = Counter(device for role in roles.values() for device in role.device_mapping or ())
    owners: dict[int, tuple[str, int]] = {}
    placements: dict[str, list[WorkerPlacement]] = {}
    for name, workers in assigned.items():
        # concurrent roles divide the cores of a node; others take turns
        co_located = on_node if concurrent else Counter(node.node_id for node, _ in workers)
        num_owned, placements[name] = 0, []
        for node, device in workers:
            owner, bundle = name, num_owned
            if device is not None:
                owner, bundle = owners.setdefault(device, (owner, bundle))
            num_owned += owner == name
            # one core per worker, or a fraction if there are more workers than cores
            num_cpus = min(1.0, int(100 * node.num_cpus / on_node[node.node_id]) / 100)
            threads = max(1, int(node.num_cpus / co_located[node.node_id]))
            num_gpus = 0.0 if device is None else int(1000 / sharers[device]) / 1000
            placements[name].append(WorkerPlacement(node, owner, bundle, device, num_gpus, num_cpus, threads))
    return placements


def bundles_of(owner: str, placements: Mapping[str, Sequence[WorkerPlacement]]) -> list[tuple[Node, dict[str, float]]]:
    """Return node and resources of each bundle that a role owns, including the workers of other roles in it."""
    by_bundle: dict[int, list[WorkerPlacement]] = {}
    for worker in (worker for role in placements.values() for worker in role if worker.owner == owner):
        by_bundle.setdefault(worker.bundle, []).append(worker)
    bundles = []
    for _, workers in sorted(by_bundle.items()):
        resources = {"CPU": round(sum(worker.num_cpus for worker in workers), 2)}
        resources |= {"GPU": 1.0} if workers[0].device is not None else {}
        bundles.append((workers[0].node, {name: amount for name, amount in resources.items() if amount}))
    return bundles


def _assign_nodes(
    nodes: Sequence[Node], name: str, role: RoleConfig, devices_per_node: int | None
) -> list[tuple[Node, int | None]]:
    """Return the node and the device, None for a CPU worker, of each rank."""
    if role.device_mapping:
        return _nodes_of_devices(nodes, name, role.device_mapping, devices_per_node)
    if not any(node.num_cpus > 0 for node in nodes):
        raise ResourceError(f"{name} requests CPU workers, but {_describe(nodes)}; add nodes with CPUs")
    num_workers: Counter[str] = Counter()
    for _ in range(role.num_processes):
        # the node that would have the most cores per worker, the first of equals
        node = max(nodes, key=lambda node: node.num_cpus / (num_workers[node.node_id] + 1))
        num_workers[node.node_id] += 1
    # consecutive ranks share a node
    return [(node, None) for node in nodes for _ in range(num_workers[node.node_id])]


def _nodes_of_devices(
    nodes: Sequence[Node], name: str, devices: Sequence[int], devices_per_node: int | None
) -> list[tuple[Node, int | None]]:
    sizes = sorted({node.num_gpus for node in nodes if node.num_gpus > 0})
    if devices_per_node is None and len(sizes) > 1:
        raise ResourceError(
            f"{name}.device_mapping needs the same number of GPUs on every node, but {_describe(nodes)}; set "
            "num_gpus_per_node to the number to use per node"
        )
    size, usable = _nodes_with_devices(nodes, devices_per_node)
    count, highest = len(devices), max(devices)
    if highest >= size * len(usable):
        available = f"devices 0 to {size * len(usable) - 1}" if usable else "no devices"
        limit = f" with num_gpus_per_node {size}" if devices_per_node else ""
        raise ResourceError(
            f"{name}.device_mapping requests {count} device{'s' if count > 1 else ''}, up to device {highest}, "
            f"but {_describe(nodes)} ({available}{limit}); use available devices, add nodes, or remove device_mapping "
            "and set num_workers to train on CPUs"
        )
    return [(usable[device // size], device) for device in devices]


def note_idle_devices(roles: Mapping[str, RoleConfig], num_free: int) -> list[str]:
    """Name the roles that compute on CPUs while GPUs of the cluster are free; torchrun and one process use GPUs."""
    return [
        f"{name} computes on CPUs, and {num_free} GPUs of the cluster are free: {name}.num_workers is a number of CPU "
        f"workers; to use GPUs, replace it by {name}.device_mapping=list(range(0,{role.num_processes}))"
        for name, role in roles.items()
        if num_free and not role.device_mapping
    ]


def _nodes_with_devices(nodes: Sequence[Node], devices_per_node: int | None) -> tuple[int, list[Node]]:
    """Return the number of device ids per node, and the nodes that have at least as many GPUs."""
    size = devices_per_node or min((node.num_gpus for node in nodes if node.num_gpus > 0), default=1)
    return size, [node for node in nodes if node.num_gpus >= size]


def _describe(nodes: Sequence[Node]) -> str:
    kinds = Counter((node.num_gpus, node.num_cpus) for node in nodes)
    counts = [
        f"{count} node{'s' if count > 1 else ''} with {gpus} GPUs and {cpus:g} CPUs"
        for (gpus, cpus), count in kinds.items()
    ]
    return f"the cluster has {' and '.join(counts)}"


@dataclass
class ElasticScaler:
    """Fits a config to the available nodes; without `elastic` the config stays unchanged."""

    requested: DPOConfig
    nodes: Callable[[], Sequence[Node]]
    free: Callable[[], Mapping[str, float]]  # the unreserved resources of the cluster by Ray's names
    roles: Sequence[str] = ("actor_train", "reference")  # those that have workers

    def __post_init__(self) -> None:
        self.config = self._fitted()

    @property
    def notes(self) -> list[str]:
        """Warnings about roles with fewer workers than requested."""
        fitted, requested = _num_workers(self.config), _num_workers(self.requested)
        return [
            f"elastic: {name} runs with {fitted[name]} of {requested[name]} workers, because the cluster has no room "
            "for more; the pairs of each step are unchanged"
            for name in self.roles
            if fitted[name] < requested[name]
        ]

    def can_scale_up(self) -> str | None:
        """Return a message if the cluster has free resources for missing workers, otherwise None."""
        possible = self._fitted()
        current, fitted = _num_workers(self.config), _num_workers(possible)
        extra = {"GPU": 0, "CPU": 0}
        for name in self.roles:
            extra["GPU" if getattr(possible, name).device_mapping else "CPU"] += fitted[name] - current[name]
        count, free = sum(extra.values()), self.free()
        if count <= 0 or any(free.get(kind, 0.0) < needed for kind, needed in extra.items()):
            return None
        return f"the cluster has room for {count} more worker{'s' if count > 1 else ''}"

    def _fitted(self) -> DPOConfig:
        return fit_to_nodes(self.requested, self.nodes(), self.roles) if self.requested.elastic else self.requested


def _num_workers(config: DPOConfig) -> dict[str, int]:
    return {"actor_train": config.actor_train.num_processes, "reference": config.reference.num_processes}


def fit_to_nodes(
    config: DPOConfig, nodes: Sequence[Node], roles: Sequence[str] = ("actor_train", "reference")
) -> DPOConfig:
    """Remove the workers that do not fit on these nodes, whole model replicas first.

    The pairs of a step do not change: the plan is made from the original config.
    """
    fitted = {name: _fit_role(getattr(config, name), name, nodes, config.num_gpus_per_node) for name in roles}
    return config.model_copy(update=fitted)


def _fit_role(role: RoleConfig, name: str, nodes: Sequence[Node], devices_per_node: int | None) -> RoleConfig:
    requested = role.num_processes
    size, usable = _nodes_with_devices(nodes, devices_per_node)
    num_devices, mapping = size * len(usable), role.device_mapping or ()
    devices = [device for device in mapping if device < num_devices]
    if mapping and num_devices and not devices:  # a role that lost all its devices shares other roles' devices
        devices = sorted({device % num_devices for device in mapping})
    cores = int(sum(node.num_cpus for node in nodes))
    available = len(devices) if role.device_mapping else min(requested, max(1, cores))
    if available >= requested:
        return role.model_copy(update={"device_mapping": devices}) if devices else role
    settings = role.strategy_args.settings
    count, changes = settings.fit(requested, available)
    if not count:
        raise ResourceError(
            f"{name} requests {requested} workers, but the cluster has room for {available} and one model replica "
            f"needs {settings.workers_per_data_rank}; add nodes"
        )
    changed = {**role.strategy_args.strategy_config, **changes}
    strategy_args = role.strategy_args.model_copy(update={"strategy_config": changed})
    workers = {"device_mapping": devices[:count]} if role.device_mapping else {"num_workers": count}
    return role.model_copy(update={**workers, "strategy_args": strategy_args})
