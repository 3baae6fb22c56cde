"""The axes of a role from its config, and every reason why a model cannot be split so, before any worker starts."""

from __future__ import annotations

from collections.abc import Callable

from transformers import PreTrainedConfig

from thresher.config.roles import PolicyConfig, RoleConfig
from thresher.distributed.mesh import ParallelDims
from thresher.errors import UserError
from thresher.models.layouts import Layout


def axis_sizes(role: RoleConfig) -> ParallelDims:
    """Processes along each axis; what the named axes leave of them is dp_shard, or copies where nothing is split."""
    if not is_split(role):
        return ParallelDims(dp_replicate=role.num_processes)
    settings = role.strategy_args.axes
    named = settings.workers_per_data_rank * settings.dp_replicate
    return ParallelDims(
        pp=settings.pp_size,
        dp_replicate=settings.dp_replicate,
        dp_shard=max(1, role.num_processes // named),
        cp=settings.cp_size,
        tp=settings.tp_size,
    )


def is_split(role: RoleConfig) -> bool:
    """A reference's workers have a whole copy each unless its engine is fsdp2_infer."""
    return isinstance(role, PolicyConfig) or role.strategy_args.strategy_name == "fsdp2_infer"


def check_num_processes(role: RoleConfig, section: str) -> None:
    """Refuse axes whose product does not divide the number of workers."""
    settings, workers = role.strategy_args.axes, role.num_processes
    if not is_split(role) and role.strategy_args.strategy_config:
        raise UserError(
            f"{section}.strategy_args.strategy_config has no effect with hf_infer, which keeps whole copies; remove "
            "it, or set strategy_name to fsdp2_infer"
        )
    sizes = {name: getattr(settings, name) for name in ("pp_size", "dp_replicate", "cp_size", "tp_size")}
    named = settings.workers_per_data_rank * settings.dp_replicate
    if workers % named == 0:
        return
    product = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
    nearest = [count for count in (workers // named * named, (workers // named + 1) * named) if count]
    raise UserError(
        f"{section} has {workers} worker{'s' if workers > 1 else ''}, and {product} = {named} does not divide that; "
        f"use {' or '.join(map(str, nearest))} workers (device_mapping, or num_workers on CPUs), or smaller axes"
    )


def check_axes(role: RoleConfig, section: str, family: PreTrainedConfig, layout: Layout) -> None:
    """Refuse axes that this model or this layout of pairs cannot have, naming the sizes that it can."""
    settings, sizes = role.strategy_args.axes, axis_sizes(role)
    text = family.get_text_config()
    heads, layers = int(text.num_attention_heads), int(text.num_hidden_layers)
    kv_heads = int(getattr(text, "num_key_value_heads", None) or heads)
    if sizes.tp > 1 and not family.get_text_config().base_model_tp_plan:
        raise UserError(
            f"{section}: tp_size is {sizes.tp}, and transformers has no tensor-parallel plan for the model family "
            f"{family.model_type}; leave tp_size out"
        )

    def tp_fits(size: int) -> bool:
        return heads % size == 0 and kv_heads % size == 0

    def cp_fits(size: int) -> bool:
        own_heads, own_kv_heads = heads // sizes.tp, kv_heads // sizes.tp
        return own_heads % size == 0 and (own_kv_heads % size == 0 or size % own_kv_heads == 0)

    _check(section, "tp_size", sizes.tp, tp_fits, f"{heads} heads with {kv_heads} of keys and values", heads)
    if sizes.cp > 1 and not layout.needs_pair_attention:
        raise UserError(
            f"{section}: cp_size is {sizes.cp}, which splits packed rows, and the layout is {layout.name}; leave "
            "cp_size out, or use layout=shared or layout=packed where the model allows it"
        )
    own = f"{heads // sizes.tp} heads with {kv_heads // sizes.tp} of keys and values"
    _check(section, "cp_size", sizes.cp, cp_fits, own + (" a worker" if sizes.tp > 1 else ""), heads // sizes.tp)
    stages = sizes.pp * settings.virtual_pp_size
    if stages > layers:
        raise UserError(
            f"{section}: pp_size {sizes.pp} with virtual_pp_size {settings.virtual_pp_size} makes {stages} stages, and "
            f"the model has {layers} layers; use at most {layers}"
        )


def _check(section: str, name: str, size: int, fits: Callable[[int], bool], what: str, limit: int) -> None:
    if not fits(size):
        possible = ", ".join(str(other) for other in range(1, limit + 1) if fits(other))
        raise UserError(f"{section}: {name} is {size}, and the model has {what}; {name} can be {possible}")
