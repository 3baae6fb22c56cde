"""ResourceManager: the devices and cores of a run, reserved on a Ray cluster."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group

from thresher.errors import ResourceError
from thresher.runtime.ray.placement import Node, RoleDemand, WorkerPlacement, bundles_of, place_roles

# nodes that are there give their resources within a second; longer means that somebody else holds them
_SECONDS_TO_RESERVE = 60.0
_SECONDS_BETWEEN_LOOKS = 2.0


class ResourceManager:
    """Reserve what every role asks for, each bundle on the node that its device ids say.

    An impossible wish is refused here, before anything is started.
    """

    def __init__(self, roles: Sequence[RoleDemand], devices_per_node: int | None, *, at_once: bool):
        self._places = place_roles(alive_nodes(), roles, devices_per_node, at_once=at_once)
        self._groups: dict[str, Any] = {}
        try:
            for role in roles:
                self._reserve(role.name)
        except BaseException:
            self.close()
            raise

    def places(self, role: str) -> list[WorkerPlacement]:
        return self._places[role]

    def group(self, owner: str) -> Any:
        """The placement group that holds the bundles of a role."""
        return self._groups[owner]

    def release(self, role: str) -> None:
        """Give back what only this role used; what it shares with others stays."""
        if role in self._groups:
            remove_placement_group(self._groups.pop(role))

    def close(self) -> None:
        for role in list(self._groups):
            self.release(role)

    def _reserve(self, owner: str) -> None:
        bundles = bundles_of(owner, self._places)
        if not bundles:
            return
        # device ids name nodes, so each bundle says which node it must lie on
        selectors = [{"ray.io/node-id": node.node_id} for node, _ in bundles]
        group = placement_group([amounts for _, amounts in bundles], strategy="PACK", bundle_label_selector=selectors)
        self._groups[owner] = group
        deadline = time.monotonic() + _SECONDS_TO_RESERVE
        while not group.wait(min(_SECONDS_TO_RESERVE, _SECONDS_BETWEEN_LOOKS)):
            alive = {node.node_id for node in alive_nodes()}
            if gone := {node.address for node, _ in bundles if node.node_id not in alive}:
                raise ResourceError(f"the node at {', '.join(sorted(gone))} went away; start the run again")
            if time.monotonic() < deadline:
                continue
            free = {name: ray.available_resources().get(name, 0.0) for name in ("GPU", "CPU")}
            asked = {name: sum(amounts.get(name, 0.0) for _, amounts in bundles) for name in free}
            raise ResourceError(
                f"{owner} asks for {asked['GPU']:g} GPUs and {asked['CPU']:g} CPUs, which are there, but other work "
                f"holds them ({free['GPU']:g} and {free['CPU']:g} are free); wait for it, or name other devices"
            )


def alive_nodes() -> list[Node]:
    """The nodes of the cluster in the order in which device ids count them: the head first, then by address."""
    found = []
    for node in ray.nodes():
        if node["Alive"]:
            has, address = node["Resources"], node["NodeManagerAddress"]
            described = Node(node["NodeID"], address, has.get("CPU", 0.0), int(has.get("GPU", 0)))
            found.append(("node:__internal_head__" not in has, address, node["NodeID"], described))
    return [described for *_, described in sorted(found, key=lambda each: each[:3])]
