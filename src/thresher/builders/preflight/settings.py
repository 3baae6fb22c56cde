"""Checks of the loss, the reference mode and the workers: they need torch, but no file and no model."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from thresher.builders.engines import check_strategy
from thresher.builders.objective import build_objective
from thresher.builders.preflight.findings import Finding, problems_of, warning
from thresher.builders.reference_mode import (
    reference_has_workers,
    reference_mode,
    same_initial_weights,
    unused_settings,
)
from thresher.config import DPOConfig
from thresher.models.loading.load import DTYPES


def check_reference_mode(config: DPOConfig) -> Iterator[Finding]:
    """Also finds an unknown loss, and parameters and modifiers that it does not have."""
    mode = reference_mode(config, build_objective(config))
    for text in unused_settings(config, mode):
        yield warning(text)
    has_own_model = mode in ("precompute", "concurrent")
    policy_dtype, reference_dtype = config.actor_train.model_args.dtype, config.reference_dtype
    is_coarser = torch.finfo(DTYPES[reference_dtype]).eps > torch.finfo(DTYPES[policy_dtype]).eps
    if has_own_model and same_initial_weights(config) and is_coarser:
        yield Finding(
            f"reference.model_args.dtype is {reference_dtype} and actor_train.model_args.dtype is {policy_dtype}, but "
            "both start from the same weights, so margins would not start at 0; remove reference.model_args.dtype"
        )
    has_workers = mode == "concurrent" and config.uses_ray and reference_has_workers(config, mode)
    if has_workers and not config.reference.is_replicated:
        yield Finding(
            "a concurrent reference cannot be sharded; set reference.strategy_args.strategy_name to hf_infer, or "
            "reference.mode to precompute"
        )


def check_strategies(config: DPOConfig) -> Iterator[Finding]:
    yield from problems_of(check_strategy, config.actor_train, "actor_train")
    yield from problems_of(check_strategy, config.reference, "reference")


SETTINGS = (check_reference_mode, check_strategies)
