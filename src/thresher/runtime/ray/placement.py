"""Which node and which share of a device each worker gets: a pure function of the cluster and of what roles ask for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from thresher.errors import ResourceError


@dataclass(frozen=True)
class Node:
    """A node of the cluster, by Ray's id of it."""

    node_id: str
    address: str
    num_cpus: float
    num_gpus: int


@dataclass(frozen=True)
class RoleDemand:
    """What a role asks for: global device ids, one worker each, or a number of CPU workers."""

    name: str
    devices: tuple[int, ...]
    num_workers: int


@dataclass(frozen=True)
class WorkerPlacement:
    """Where one worker runs.

    bundle: which of the resource bundles of `owner` it lies in; roles that share a device share its bundle.
    num_cpus: what is reserved for it. threads: how many it computes with.
    """

    node: Node
    owner: str
    bundle: int
    device: int | None
    num_gpus: float
    num_cpus: float
    threads: int


def place_roles(
    nodes: Sequence[Node], roles: Sequence[RoleDemand], devices_per_node: int | None, *, at_once: bool
) -> dict[str, list[WorkerPlacement]]:
    """Give every worker of every role its place, or refuse what the cluster cannot hold.

    at_once: the roles compute at the same time and divide a node's cores; otherwise they take turns.
    """
    seats = {role.name: _seats(nodes, role, devices_per_node) for role in roles}
    on_node = Counter(node.node_id for places in seats.values() for node, _ in places)
    sharers = Counter(device for role in roles for device in role.devices)
    owners: dict[int, tuple[str, int]] = {}
    found: dict[str, list[WorkerPlacement]] = {}
    for role in roles:
        mates = on_node if at_once else Counter(node.node_id for node, _ in seats[role.name])
        num_own, found[role.name] = 0, []
        for node, device in seats[role.name]:
            owner, bundle = role.name, num_own
            if device is not None:
                owner, bundle = owners.setdefault(device, (owner, bundle))
            num_own += owner == role.name
            # a core is reserved where there is one for each; more workers than cores share them
            num_cpus = min(1.0, int(100 * node.num_cpus / on_node[node.node_id]) / 100)
            threads = max(1, int(node.num_cpus / mates[node.node_id]))
            num_gpus = 0.0 if device is None else int(1000 / sharers[device]) / 1000
            found[role.name].append(WorkerPlacement(node, owner, bundle, device, num_gpus, num_cpus, threads))
    return found


def bundles_of(owner: str, places: Mapping[str, Sequence[WorkerPlacement]]) -> list[tuple[Node, dict[str, float]]]:
    """Resources of each bundle that a role owns, with what other roles put into it, and the node it must lie on."""
    inside: dict[int, list[WorkerPlacement]] = {}
    for place in (place for group in places.values() for place in group if place.owner == owner):
        inside.setdefault(place.bundle, []).append(place)
    bundles = []
    for _, mates in sorted(inside.items()):
        resources = {"CPU": round(sum(place.num_cpus for place in mates), 2)}
        resources |= {"GPU": 1.0} if mates[0].device is not None else {}
        bundles.append((mates[0].node, {name: amount for name, amount in resources.items() if amount}))
    return bundles


def _seats(nodes: Sequence[Node], role: RoleDemand, devices_per_node: int | None) -> list[tuple[Node, int | None]]:
    if role.devices:
        return [(node, device) for device, node in _nodes_of_devices(nodes, role, devices_per_node)]
    if not any(node.num_cpus > 0 for node in nodes):
        raise ResourceError(f"{role.name} asks for CPU workers, and {_describe(nodes)}; add nodes with CPUs")
    taken: Counter[str] = Counter()
    seats: list[tuple[Node, int | None]] = []
    for _ in range(role.num_workers):
        # the node with most cores for one more worker; of equals, the first
        node = max(nodes, key=lambda node: node.num_cpus / (taken[node.node_id] + 1))
        taken[node.node_id] += 1
        seats.append((node, None))
    # neighbours in rank are neighbours on a node
    order = {node.node_id: at for at, node in enumerate(nodes)}
    return sorted(seats, key=lambda seat: order[seat[0].node_id])


def _nodes_of_devices(nodes: Sequence[Node], role: RoleDemand, devices_per_node: int | None) -> list[tuple[int, Node]]:
    sizes = sorted({node.num_gpus for node in nodes if node.num_gpus > 0})
    if devices_per_node is None and len(sizes) > 1:
        raise ResourceError(
            f"{role.name}.device_mapping counts devices node by node, and {_describe(nodes)}; set num_gpus_per_node to "
            "the number that each of them gives"
        )
    size, able = _nodes_with_devices(nodes, devices_per_node)
    highest = max(role.devices)
    if highest >= size * len(able):
        offer = f"devices 0 to {size * len(able) - 1}" if able else "no device"
        counted = f", {size} counted on each" if devices_per_node else ""
        raise ResourceError(
            f"{role.name}.device_mapping asks for {len(role.devices)} devices up to device {highest}, and "
            f"{_describe(nodes)}{counted}: it has {offer}; name devices that are there, add nodes, or leave "
            "device_mapping out and set num_workers to train on CPUs"
        )
    return [(device, able[device // size]) for device in role.devices]


def devices_of(nodes: Sequence[Node], devices_per_node: int | None) -> int:
    """How many device ids the nodes have."""
    size, able = _nodes_with_devices(nodes, devices_per_node)
    return size * len(able)


def _nodes_with_devices(nodes: Sequence[Node], devices_per_node: int | None) -> tuple[int, list[Node]]:
    """Devices of each node, and the nodes that have as many."""
    size = devices_per_node or min((node.num_gpus for node in nodes if node.num_gpus > 0), default=1)
    return size, [node for node in nodes if node.num_gpus >= size]


def _describe(nodes: Sequence[Node]) -> str:
    kinds = Counter((node.num_gpus, node.num_cpus) for node in nodes)
    parts = [
        f"{count} node{'s' if count > 1 else ''} with {gpus} GPUs and {cpus:g} CPUs"
        for (gpus, cpus), count in kinds.items()
    ]
    return f"the cluster has {' and '.join(parts)}"
