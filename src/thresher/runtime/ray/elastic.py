"""A run on what the cluster has: the same config with fewer workers, where nodes are missing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from thresher.builders.axes import axis_sizes
from thresher.config import DPOConfig
from thresher.config.roles import RoleConfig
from thresher.errors import ResourceError
from thresher.runtime.ray.placement import Node, devices_of


class ElasticScaler:
    """A config as it fits the nodes that are there now; unchanged where it is not to be elastic.

    free gives what of the cluster nobody uses, as Ray names it; roles are those that have workers.
    """

    def __init__(
        self,
        config: DPOConfig,
        nodes: Callable[[], Sequence[Node]],
        free: Callable[[], Mapping[str, float]],
        roles: Sequence[str] = ("actor_train", "reference"),
    ):
        self._wanted = config
        self._nodes = nodes
        self._free = free
        self._names = roles
        self.config = self._fitted()

    @property
    def notes(self) -> list[str]:
        """Lines on roles that have fewer workers than they should."""
        pairs = ((name, _role(self._wanted, name), _role(self.config, name)) for name in self._names)
        return [
            f"elastic: {fitted.num_processes} of {wanted.num_processes} workers of {name}, as the cluster has no room "
            "for more; the steps stay the same"
            for name, wanted, fitted in pairs
            if fitted.num_processes < wanted.num_processes
        ]

    def can_scale_up(self) -> str | None:
        """Say so where the cluster has room for workers that are missing, and nobody else uses it."""
        larger = self._fitted()
        extra = {"GPU": 0, "CPU": 0}
        for name in self._names:
            role = _role(larger, name)
            extra["GPU" if role.device_mapping else "CPU"] += (
                role.num_processes - _role(self.config, name).num_processes
            )
        count, free = sum(extra.values()), self._free()
        if count <= 0 or any(free.get(kind, 0.0) < needed for kind, needed in extra.items()):
            return None
        return f"the cluster has room for {count} more worker{'s' if count > 1 else ''}"

    def _fitted(self) -> DPOConfig:
        return fit_to_nodes(self._wanted, self._nodes(), self._names) if self._wanted.elastic else self._wanted


def _role(config: DPOConfig, name: str) -> RoleConfig:
    role: RoleConfig = getattr(config, name)
    return role


def fit_to_nodes(
    config: DPOConfig, nodes: Sequence[Node], roles: Sequence[str] = ("actor_train", "reference")
) -> DPOConfig:
    """Take away the workers that have no place on these nodes, whole copies of the model first.

    Which pairs a step has is none of this: the plan is made from the config as it was written.
    """
    fitted = {name: _fit_role(_role(config, name), name, nodes, config.num_gpus_per_node) for name in roles}
    return config.model_copy(update=fitted)


def _fit_role(role: RoleConfig, name: str, nodes: Sequence[Node], devices_per_node: int | None) -> RoleConfig:
    wanted = role.num_processes
    there, mapping = devices_of(nodes, devices_per_node), role.device_mapping or ()
    devices = [each for each in mapping if each < there]
    if mapping and there and not devices:  # a role of which nothing is left shares what the others have
        devices = sorted({each % there for each in mapping})
    cores = int(sum(node.num_cpus for node in nodes))
    offered = len(devices) if role.device_mapping else min(wanted, max(1, cores))
    if offered >= wanted:
        return role.model_copy(update={"device_mapping": devices}) if devices else role
    count, copies = _divide(role, offered)
    if not count:
        raise ResourceError(
            f"{name} has {wanted} workers, of which the cluster has room for {offered}, and one copy of the model "
            f"takes {role.strategy_args.axes.workers_per_data_rank}; add nodes"
        )
    settings = role.strategy_args.strategy_config
    if "dp_replicate" in settings:
        settings = {**settings, "dp_replicate": copies}
    strategy_args = role.strategy_args.model_copy(update={"strategy_config": settings})
    if role.device_mapping:
        return role.model_copy(update={"device_mapping": devices[:count], "strategy_args": strategy_args})
    return role.model_copy(update={"num_workers": count, "strategy_args": strategy_args})


def _divide(role: RoleConfig, offered: int) -> tuple[int, int]:
    """Workers and copies. Fewer copies leave each worker what it held; only then shards become larger."""
    sizes = axis_sizes(role)
    one_copy = sizes.pp * sizes.cp * sizes.tp * sizes.dp_shard
    if sizes.dp_replicate > 1 and offered >= one_copy:
        copies = offered // one_copy
        return copies * one_copy, copies
    one_rank = sizes.pp * sizes.cp * sizes.tp
    return offered // one_rank * one_rank, 1
