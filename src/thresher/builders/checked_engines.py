"""Engines that are checked on real pairs; layout `auto` becomes `padded` for a model that fails in packed rows."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

import torch

from thresher.builders.data import check_examples, probe_examples
from thresher.builders.engines import build_policy, build_reference
from thresher.builders.inputs import RunInputs, find_layout
from thresher.config.roles import RoleConfig
from thresher.distributed.groups import SINGLE_PROCESS, Group
from thresher.engines.engine import Engine, TrainEngine
from thresher.models.forward_check import LayoutError
from thresher.models.layouts import Layout
from thresher.models.loading.load import load_model_config

logger = logging.getLogger(__name__)
Built = TypeVar("Built", bound=Engine)


def build_checked_policy(
    inputs: RunInputs, *, device: torch.device | None = None, world: Group = SINGLE_PROCESS
) -> tuple[TrainEngine, Layout, tuple[str, ...]]:
    """Build the policy, with the layout that it supports and notes on why that is not the chosen one.

    Reject pairs longer than its context, and logps that differ from its original forward.
    """
    config, trusts = inputs.config, inputs.config.actor_train.model_args.trust_remote_code
    model_config = load_model_config(inputs.policy_path, trust_remote_code=trusts)
    check_examples(config, inputs.objective, model_config, [inputs.train, inputs.validation])
    return _build_checked(
        inputs, config.actor_train, lambda layout: build_policy(config, layout, device=device, world=world)
    )


def build_checked_reference(
    inputs: RunInputs,
    *,
    device: torch.device | None = None,
    world: Group = SINGLE_PROCESS,
    role: RoleConfig | None = None,
) -> Engine:
    """Build the reference, see `build_reference`; reject logps that differ from its original forward."""
    config = inputs.config
    reference, _, notes = _build_checked(
        inputs,
        role or config.reference,
        lambda layout: build_reference(config, layout, device=device, world=world, role=role),
    )
    for note in notes:
        logger.warning("reference: %s", note)
    return reference


def _build_checked(
    inputs: RunInputs, role: RoleConfig, build: Callable[[Layout], Built]
) -> tuple[Built, Layout, tuple[str, ...]]:
    probe = probe_examples(inputs.train)
    engine = build(inputs.layout)
    try:
        engine.check_logps(probe)
        return engine, inputs.layout, ()
    except LayoutError as error:
        # a row shard needs packed rows
        if inputs.config.layout != "auto" or role.strategy_args.settings.splits_rows:
            raise
        note = f"using layout padded: {str(error).removesuffix('; use layout=padded')}"
    del engine  # one model at a time
    _, padded, _ = find_layout(inputs.config.model_copy(update={"layout": "padded"}))
    engine = build(padded)
    engine.check_logps(probe)
    return engine, padded, (note,)
