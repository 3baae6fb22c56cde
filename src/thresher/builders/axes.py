"""The parallel axes of a role, and the checks that a model supports them, before any worker starts."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from thresher.config.roles import PolicyConfig, RoleConfig
from thresher.distributed.mesh import ParallelDims
from thresher.errors import UserError

if TYPE_CHECKING:  # `submit` checks the axes without importing transformers
    from transformers import PreTrainedConfig

    from thresher.models.layouts import Layout

_STRATEGIES = {"actor_train": ("fsdp2_train",), "reference": ("hf_infer", "fsdp2_infer")}


def axis_sizes(role: RoleConfig) -> ParallelDims:
    """Processes along each axis; the remaining ones go to dp_shard, or to dp_replicate if the role is not sharded."""
    if not is_sharded(role):
        return ParallelDims(dp_replicate=role.num_processes)
    settings = role.strategy_args.axes
    product = settings.workers_per_data_rank * settings.dp_replicate
    return ParallelDims(
        pp=settings.pp_size,
        dp_replicate=settings.dp_replicate,
        dp_shard=max(1, role.num_processes // product),
        cp=settings.cp_size,
        tp=settings.tp_size,
    )


def is_sharded(role: RoleConfig) -> bool:
    """The policy always is; each worker of a reference has a full copy, except with fsdp2_infer."""
    return isinstance(role, PolicyConfig) or role.strategy_args.strategy_name == "fsdp2_infer"


def check_strategy(role: RoleConfig, section: str) -> None:
    """Reject a strategy that does not exist, and axes whose product does not divide the number of workers."""
    name, available = role.strategy_args.strategy_name, _STRATEGIES[section]
    if name is not None and name not in available:
        raise UserError(
            f"{section}.strategy_args.strategy_name {name} is not available in this version; use "
            f"{' or '.join(available)}"
        )
    settings, workers = role.strategy_args.axes, role.num_processes
    if not is_sharded(role) and role.strategy_args.strategy_config:
        raise UserError(
            f"{section}.strategy_args.strategy_config has no effect with hf_infer, which keeps a full copy per worker; "
            "remove it, or set strategy_name to fsdp2_infer"
        )
    if settings.cpu_offload and axis_sizes(role).fsdp_size == 1:
        raise UserError(
            f"{section}.strategy_args.strategy_config.cpu_offload has no effect: no two workers shard the model; use "
            "more workers or remove it"
        )
    sizes = {name: getattr(settings, name) for name in ("pp_size", "dp_replicate", "cp_size", "tp_size")}
    product = settings.workers_per_data_rank * settings.dp_replicate
    if workers % product == 0:
        return
    factors = [f"{name} {size}" for name, size in sizes.items() if size > 1]
    divisor = " x ".join(factors) + (f" = {product}" if len(factors) > 1 else "")
    nearest = [count for count in (workers // product * product, (workers // product + 1) * product) if count]
    raise UserError(
        f"{section} has {workers} worker{'s' if workers > 1 else ''}, which is not a multiple of {divisor}; use "
        f"{' or '.join(map(str, nearest))} workers (device_mapping, or num_workers on CPUs), or smaller axes"
    )


def check_axes(role: RoleConfig, section: str, model_config: PreTrainedConfig, layout: Layout) -> None:
    """Reject axes that this model or layout does not support, listing the valid sizes."""
    settings, sizes = role.strategy_args.axes, axis_sizes(role)
    text = model_config.get_text_config()
    heads, layers = int(text.num_attention_heads), int(text.num_hidden_layers)
    kv_heads = int(getattr(text, "num_key_value_heads", None) or heads)
    if sizes.tp > 1 and not text.base_model_tp_plan:
        raise UserError(
            f"{section}: tp_size is {sizes.tp}, but transformers has no tensor-parallel plan for the architecture "
            f"{model_config.model_type}; remove tp_size"
        )

    def tp_fits(size: int) -> bool:
        return heads % size == 0 and kv_heads % size == 0

    def cp_fits(size: int) -> bool:
        local_heads, local_kv_heads = heads // sizes.tp, kv_heads // sizes.tp
        return local_heads % size == 0 and (local_kv_heads % size == 0 or size % local_kv_heads == 0)

    _check(section, "tp_size", sizes.tp, tp_fits, f"{heads} attention heads and {kv_heads} key/value heads", heads)
    if sizes.cp > 1 and not layout.needs_pair_attention:
        raise UserError(
            f"{section}: cp_size is {sizes.cp}, but the layout is {layout.name}, and context parallelism needs packed "
            "rows; remove cp_size, or use layout=shared or layout=packed if the model supports it"
        )
    local = f"{heads // sizes.tp} attention heads and {kv_heads // sizes.tp} key/value heads"
    _check(section, "cp_size", sizes.cp, cp_fits, local + (" per tp rank" if sizes.tp > 1 else ""), heads // sizes.tp)
    stages = sizes.pp * settings.virtual_pp_size
    if stages > layers:
        raise UserError(
            f"{section}: pp_size {sizes.pp} with virtual_pp_size {settings.virtual_pp_size} makes {stages} stages, but "
            f"the model has {layers} layers; use at most {layers} stages"
        )


def _check(section: str, name: str, size: int, fits: Callable[[int], bool], what: str, limit: int) -> None:
    if not fits(size):
        valid = ", ".join(str(other) for other in range(1, limit + 1) if fits(other))
        raise UserError(f"{section}: {name} is {size}, but the model has {what}; valid sizes are {valid}")
