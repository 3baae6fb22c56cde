"""Elastic scaling: reduce the workers of a config to the nodes that are available."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from thresher.config import DPOConfig
from thresher.config.roles import RoleConfig
from thresher.errors import ResourceError
from thresher.runtime.ray.placement import Node, count_devices


class ElasticScaler:
    """Fits a config to the available nodes; without `elastic` the config stays unchanged.

    free: returns the unreserved resources of the cluster by Ray's names. roles: the roles that have workers.
    """

    def __init__(
        self,
        config: DPOConfig,
        nodes: Callable[[], Sequence[Node]],
        free: Callable[[], Mapping[str, float]],
        roles: Sequence[str] = ("actor_train", "reference"),
    ):
        self._requested = config
        self._nodes = nodes
        self._free = free
        self._roles = roles
        self.config = self._fitted()

    @property
    def notes(self) -> list[str]:
        """Warnings about roles with fewer workers than requested."""
        counts = (
            (name, _role(self.config, name).num_processes, _role(self._requested, name).num_processes)
            for name in self._roles
        )
        return [
            f"elastic: {name} runs with {fitted} of {requested} workers, because the cluster has no room for more; the "
            "pairs of each step are unchanged"
            for name, fitted, requested in counts
            if fitted < requested
        ]

    def can_scale_up(self) -> str | None:
        """Return a message if the cluster has free resources for missing workers, otherwise None."""
        possible = self._fitted()
        extra = {"GPU": 0, "CPU": 0}
        for name in self._roles:
            role = _role(possible, name)
            extra["GPU" if role.device_mapping else "CPU"] += (
                role.num_processes - _role(self.config, name).num_processes
            )
        count, free = sum(extra.values()), self._free()
        if count <= 0 or any(free.get(kind, 0.0) < needed for kind, needed in extra.items()):
            return None
        return f"the cluster has room for {count} more worker{'s' if count > 1 else ''}"

    def _fitted(self) -> DPOConfig:
        return fit_to_nodes(self._requested, self._nodes(), self._roles) if self._requested.elastic else self._requested


def _role(config: DPOConfig, name: str) -> RoleConfig:
    role: RoleConfig = getattr(config, name)
    return role


def fit_to_nodes(
    config: DPOConfig, nodes: Sequence[Node], roles: Sequence[str] = ("actor_train", "reference")
) -> DPOConfig:
    """Remove the workers that do not fit on these nodes, whole model replicas first.

    The pairs of a step do not change: the plan is made from the original config.
    """
    fitted = {name: _fit_role(_role(config, name), name, nodes, config.num_gpus_per_node) for name in roles}
    return config.model_copy(update=fitted)


def _fit_role(role: RoleConfig, name: str, nodes: Sequence[Node], devices_per_node: int | None) -> RoleConfig:
    requested = role.num_processes
    num_devices, mapping = count_devices(nodes, devices_per_node), role.device_mapping or ()
    devices = [device for device in mapping if device < num_devices]
    if mapping and num_devices and not devices:  # a role that lost all its devices shares those of other roles
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
    if role.device_mapping:
        return role.model_copy(update={"device_mapping": devices[:count], "strategy_args": strategy_args})
    return role.model_copy(update={"num_workers": count, "strategy_args": strategy_args})
