"""Optimizer state keyed by parameter name, restored bit for bit.

torch keys it by position, so a reordered model silently swaps moments, and casts it to the parameter's dtype on load,
so fp32 moments of bf16 parameters lose bits. Tensors are named `<state>/<parameter>`; the rest is JSON. If the
optimizer works on local shards of parameters, its tensors are shards, and the stored shapes are those of the full
parameters.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from thresher.checkpoint.state import State
from thresher.errors import CheckpointError


def optimizer_state(
    optimizer: torch.optim.Optimizer,
    names: Mapping[Parameter, str],
    full_parameters: Mapping[str, Tensor] | None = None,
) -> State:
    """Collect an optimizer's state; a parameter without state is listed without values.

    full_parameters: the parameters by name, if the optimizer works on local shards of them.
    """
    tensors: dict[str, Tensor] = {}
    values: dict[str, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        shapes = _shapes(group["params"], names, full_parameters)
        groups.append({"names": list(shapes), "shapes": list(shapes.values())})
        for name, parameter in zip(shapes, group["params"], strict=True):
            if parameter not in optimizer.state:
                continue
            values[name] = {}
            for key, value in optimizer.state[parameter].items():
                if isinstance(value, Tensor):
                    tensors[f"{key}/{name}"] = value
                else:
                    values[name][key] = value
    return State(tensors, {"type": type(optimizer).__name__, "groups": groups, "values": values})


def load_optimizer_state(
    optimizer: torch.optim.Optimizer,
    names: Mapping[Parameter, str],
    state: State,
    full_parameters: Mapping[str, Tensor] | None = None,
    other_rank_names: Collection[str] = (),
) -> None:
    """Replace an optimizer's state by a saved one; change nothing if it does not match.

    Hyper-parameters stay those of the optimizer: the user may have changed them in the config on purpose.
    other_rank_names: names of parameters that only other ranks have.
    """
    saved = state.values
    _check_match(optimizer, names, saved, full_parameters, other_rank_names)
    parameters = {_name_of(p, names): (p, group) for group in optimizer.param_groups for p in group["params"]}
    restored: dict[str, dict[str, Any]] = {
        name: dict(values) for name, values in saved["values"].items() if name in parameters
    }
    for key_and_name in state.tensors:
        key, _, name = key_and_name.partition("/")
        if name not in parameters:
            continue
        tensor = state.tensors[key_and_name]
        parameter, group = parameters[name]
        # torch keeps the step count on the CPU unless its kernel needs the count next to the parameter
        is_on_cpu = key == "step" and not (group.get("capturable") or group.get("fused"))
        restored.setdefault(name, {})[key] = tensor.to("cpu" if is_on_cpu else parameter.device, copy=True)
    optimizer.state.clear()
    for name, values in restored.items():
        optimizer.state[parameters[name][0]] = values


def join_values(values: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the non-tensor parts of `optimizer_state` from ranks that have different parameters."""
    groups = []
    for same_group in zip(*(each["groups"] for each in values), strict=True):
        # a dict, because two ranks may have the same parameter
        shapes = {name: shape for each in same_group for name, shape in zip(each["names"], each["shapes"], strict=True)}
        groups.append({"names": list(shapes), "shapes": list(shapes.values())})
    merged = {name: value for each in values for name, value in each["values"].items()}
    return {"type": values[0]["type"], "groups": groups, "values": merged}


def _shapes(
    parameters: Sequence[Parameter], names: Mapping[Parameter, str], full_parameters: Mapping[str, Tensor] | None
) -> dict[str, list[int]]:
    local = {_name_of(parameter, names): parameter for parameter in parameters}
    parameters_by_name = local if full_parameters is None else full_parameters
    return {name: list(parameters_by_name[name].shape) for name in local}


def _name_of(parameter: Parameter, names: Mapping[Parameter, str]) -> str:
    if parameter not in names:
        raise CheckpointError(
            f"a parameter of shape {tuple(parameter.shape)} in the optimizer has no name; "
            "build the optimizer from the model that the names come from"
        )
    return names[parameter]


def _check_match(
    optimizer: torch.optim.Optimizer,
    names: Mapping[Parameter, str],
    saved: Mapping[str, Any],
    full_parameters: Mapping[str, Tensor] | None,
    other_rank_names: Collection[str],
) -> None:
    groups = [_shapes(group["params"], names, full_parameters) for group in optimizer.param_groups]
    check_groups(saved, type(optimizer).__name__, groups, other_rank_names)


def check_groups(
    saved: Mapping[str, Any], kind: str, groups: Sequence[Mapping[str, list[int]]], other_rank_names: Collection[str]
) -> None:
    """Reject the state of another optimizer: its kind, and the shapes by name of each group, must be those of this run.

    saved: the values of a `State`. other_rank_names: names of parameters that only other ranks have.
    """
    hint = "resume with the same model, adapter and optimizer as the checkpoint"
    if saved["type"] != kind:
        raise CheckpointError(f"the checkpoint has the state of {saved['type']}, this run uses {kind}; {hint}")
    if len(saved["groups"]) != len(groups):
        raise CheckpointError(
            f"the checkpoint's optimizer has {len(saved['groups'])} parameter groups, "
            f"this run's has {len(groups)}; {hint}"
        )
    for index, (here, saved_group) in enumerate(zip(groups, saved["groups"], strict=True)):
        stored = dict(zip(saved_group["names"], saved_group["shapes"], strict=True))
        problems = [f"{name} is not in the checkpoint" for name in sorted(here.keys() - stored.keys())]
        problems += [f"{name} is not in this run" for name in sorted(stored.keys() - here.keys() - {*other_rank_names})]
        problems += [
            f"{name} has shape {stored[name]} in the checkpoint and {here[name]} in this run"
            for name in sorted(here.keys() & stored.keys())
            if here[name] != stored[name]
        ]
        if problems:
            more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
            raise CheckpointError(f"optimizer group {index}: {'; '.join(problems[:3])}{more}; {hint}")
