"""ResourceManager: reserve the devices and cores of a run on a Ray cluster."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group

from thresher.errors import ResourceError
from thresher.runtime.ray.placement import Node, RoleDemand, bundles_of, place_roles

# free resources are reserved within a second; longer means that other work uses them
_SECONDS_TO_RESERVE = 60.0
_SECONDS_BETWEEN_CHECKS = 2.0


class ResourceManager:
    """Reserve the resources of every role, each bundle on the node of its device ids.

    placements: the workers of each role. groups: Ray's placement group of each role that owns bundles.
    Requests that the cluster cannot satisfy raise here, before any worker is started.
    """

    def __init__(self, roles: Sequence[RoleDemand], devices_per_node: int | None, *, concurrent: bool):
        self.placements = place_roles(alive_nodes(), roles, devices_per_node, concurrent=concurrent)
        self.groups: dict[str, Any] = {}
        try:
            for role in roles:
                self.reserve(role.name)
        except BaseException:
            self.close()
            raise

    def release(self, role: str) -> None:
        """Release the bundles that this role owns; bundles owned by other roles stay reserved."""
        if role in self.groups:
            remove_placement_group(self.groups.pop(role))

    def close(self) -> None:
        for role in list(self.groups):
            self.release(role)

    def reserve(self, owner: str) -> None:
        """Reserve the bundles that a role owns, unless they are."""
        bundles = bundles_of(owner, self.placements)
        if not bundles or owner in self.groups:
            return
        # a device id belongs to a node, so each bundle is pinned to its node
        selectors = [{"ray.io/node-id": node.node_id} for node, _ in bundles]
        group = placement_group([amounts for _, amounts in bundles], strategy="PACK", bundle_label_selector=selectors)
        self.groups[owner] = group
        deadline = time.monotonic() + _SECONDS_TO_RESERVE
        while not group.wait(min(_SECONDS_TO_RESERVE, _SECONDS_BETWEEN_CHECKS)):
            alive = {node.node_id for node in alive_nodes()}
            if gone := {node.address for node, _ in bundles if node.node_id not in alive}:
                raise ResourceError(f"the node at {', '.join(sorted(gone))} left the cluster; start the run again")
            if time.monotonic() < deadline:
                continue
            free = {name: ray.available_resources().get(name, 0.0) for name in ("GPU", "CPU")}
            requested = {name: sum(amounts.get(name, 0.0) for _, amounts in bundles) for name in free}
            raise ResourceError(
                f"{owner} requests {requested['GPU']:g} GPUs and {requested['CPU']:g} CPUs, but other work uses them "
                f"({free['GPU']:g} GPUs and {free['CPU']:g} CPUs are free); wait for it to end, or use other devices"
            )


def alive_nodes() -> list[Node]:
    """List the nodes in the order of their device ids: the head first, then by address."""
    found = []
    for node in ray.nodes():
        if node["Alive"]:
            resources, address = node["Resources"], node["NodeManagerAddress"]
            is_worker = "node:__internal_head__" not in resources
            found.append((is_worker, address, node["NodeID"], resources.get("CPU", 0.0), int(resources.get("GPU", 0))))
    return [Node(node_id, address, cpus, gpus) for _, address, node_id, cpus, gpus in sorted(found)]
