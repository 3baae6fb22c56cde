"""Tensors that files store under other names or in parts, such as experts one by one; transformers converts them."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    convert_and_load_state_dict_in_model,
    rename_source_key,
)
from transformers.modeling_utils import LoadStateDictConfig

from thresher.distributed.tensors import to_local
from thresher.errors import UserError
from thresher.models.loading.load import REWARD_HEAD
from thresher.models.loading.weight_files import is_of_adapter, missing_tensor, wrong_shape

_NUMBER = re.compile(r"\.(\d+)(?=\.)")  # of a layer, then of an expert


def convert_shards(model: PreTrainedModel, stored: Mapping[str, Any], path: str, device: torch.device) -> None:
    """Let transformers read and convert the slices that this process needs.

    Parameters are replaced, and keep whether they are trained.
    """
    is_trained = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    mapping: Any = get_model_conversion_mapping(model)
    settings = LoadStateDictConfig(weight_mapping=mapping, device_map={"": device}, dtype=model.dtype)
    with _without_adapters(model):
        report, _ = convert_and_load_state_dict_in_model(model, dict(stored), settings)
        _check_report(report, model, path)
        model.tie_weights()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_trained[name])


def _check_report(report: Any, model: PreTrainedModel, path: str) -> None:
    """Raise the first problem of a conversion; a process that has nothing of a parameter has none with it."""
    held = {name: to_local(tensor).numel() for name, tensor in model.state_dict().items()}
    for name, shape, expected in sorted(report.mismatched_keys):
        raise wrong_shape(path, name, shape, expected)
    for name, error in report.conversion_errors.items():
        if held[name]:
            raise UserError(
                f"transformers cannot convert the tensors of {name} in {path}: {error}; download the model again"
            )
    for name in _needed(model, report.missing_keys):
        if name.endswith(REWARD_HEAD):
            nn.init.zeros_(to_local(model.get_parameter(name)))
        elif held[name]:
            raise missing_tensor(path, name)


def check_conversion(model: PreTrainedModel, stored: Mapping[str, Any], path: str) -> None:
    """Reject files from which a parameter of a model on the meta device cannot be made; reads no values."""
    mapping: Any = get_model_conversion_mapping(model)
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, WeightConverter)]
    of_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    expected = model.state_dict()
    parts: dict[str, dict[str, dict[str, list[int]]]] = defaultdict(lambda: defaultdict(dict))
    for name, tensor in stored.items():
        renamed, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, expected)
        if renamed not in expected and name in expected:
            renamed, pattern = name, None
        targets = of_pattern[pattern].target_patterns if pattern is not None else [""]
        for target in targets:
            parts[renamed.replace(targets[0], target)][pattern or ""][name] = list(tensor.get_shape())
    for name in _needed(model, expected.keys() - parts.keys()):
        if not name.endswith(REWARD_HEAD):
            raise missing_tensor(path, name)
    for name, parameter in expected.items():
        by_pattern = parts[name]
        for whole, shape in by_pattern.get("", {}).items():
            if shape != list(parameter.shape):
                raise wrong_shape(path, whole, shape, parameter.shape)
        if any("*" in pattern for pattern in by_pattern):
            _check_experts(by_pattern, of_pattern[next(iter(by_pattern))].source_patterns, name, parameter, path)


def _check_experts(
    by_pattern: Mapping[str, Mapping[str, list[int]]], patterns: list[str], name: str, whole: Tensor, path: str
) -> None:
    """Reject experts, stored one by one, that do not make up a stacked tensor."""
    for pattern in patterns:
        shapes = by_pattern.get(pattern, {})
        numbers = {int(found[-1]) for each in shapes if (found := _NUMBER.findall(each))}
        if numbers != set(range(len(whole))):
            kind = pattern.rpartition("*")[2].strip(".")
            raise UserError(
                f"the weight files of {path} have {kind} of {len(numbers & {*range(len(whole))})} of the {len(whole)} "
                f"experts of {name}; download the model again, with the config.json that belongs to it"
            )
        first = next(iter(shapes.values()))
        if different := next((each for each, shape in shapes.items() if shape != first), None):
            raise wrong_shape(path, different, shapes[different], first)
    if sum(math.prod(shape) for shapes in by_pattern.values() for shape in shapes.values()) != whole.numel():
        raise wrong_shape(path, next(iter(next(iter(by_pattern.values())))), first, whole.shape[1:])


def _needed(model: PreTrainedModel, missing: set[str]) -> Iterator[str]:
    """Yield the missing tensors that are neither tied, nor optional, nor of an adapter."""
    optional = model._keys_to_ignore_on_load_missing or ()
    for name in sorted(missing - model.all_tied_weights_keys.keys()):
        if not is_of_adapter(name) and not any(re.search(pattern, name) for pattern in optional):
            yield name


@contextmanager
def _without_adapters(model: nn.Module) -> Iterator[None]:
    """Within a `with` block, modules stand in the place of the adapters around them."""
    wrapped = [
        (parent, name, child)
        for parent in model.modules()
        if not hasattr(parent, "base_layer")
        for name, child in parent.named_children()
        if hasattr(child, "base_layer") or hasattr(child, "original_module")
    ]
    for parent, name, child in wrapped:
        inner: Any = child.get_base_layer() if hasattr(child, "base_layer") else child.original_module  # type: ignore[operator]
        parent._modules[name] = inner
    try:
        yield
    finally:
        for parent, name, child in wrapped:
            parent._modules[name] = child
