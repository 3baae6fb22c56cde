"""Optimizer state keyed by parameter name, restored bit for bit.

torch keys it by position, where a reordered model silently swaps moments, and casts it to the parameter's
dtype on load, where fp32 moments of bf16 parameters lose bits. Tensors are named `<state>/<parameter>`; the
rest is JSON. An optimizer may work on parts of parameters: then its tensors are parts, and shapes those of the wholes.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from thresher.checkpoint.state import State
from thresher.errors import CheckpointError


def optimizer_state(
    optimizer: torch.optim.Optimizer, names: Mapping[Parameter, str], wholes: Mapping[str, Tensor] | None = None
) -> State:
    """Collect an optimizer's state; parameters without any yet have none in the result.

    wholes: the parameters by name, where the optimizer works on parts of them.
    """
    tensors: dict[str, Tensor] = {}
    values: dict[str, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        members = [_name_of(parameter, names) for parameter in group["params"]]
        shapes = list(_shapes(group["params"], names, wholes).values())
        groups.append({"names": members, "shapes": shapes})
        for name, parameter in zip(members, group["params"], strict=True):
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
    wholes: Mapping[str, Tensor] | None = None,
    elsewhere: Collection[str] = (),
) -> None:
    """Replace an optimizer's state by a saved one; change nothing if it does not fit.

    Hyper-parameters stay those of the optimizer: they are the config's, which a person may have changed on purpose.
    elsewhere: names of parameters that other processes of the run have.
    """
    saved = state.values
    _check_fit(optimizer, names, saved, wholes, elsewhere)
    parameters = {_name_of(p, names): (p, group) for group in optimizer.param_groups for p in group["params"]}
    restored: dict[str, dict[str, Any]] = {
        name: dict(values) for name, values in saved["values"].items() if name in parameters
    }
    for full_name in state.tensors:
        key, _, name = full_name.partition("/")
        if name not in parameters:
            continue
        tensor = state.tensors[full_name]
        parameter, group = parameters[name]
        # torch counts steps on the CPU unless its kernel needs the count beside the parameter.
        stays = key == "step" and not (group.get("capturable") or group.get("fused"))
        restored.setdefault(name, {})[key] = tensor.to("cpu" if stays else parameter.device, copy=True)
    optimizer.state.clear()
    for name, values in restored.items():
        optimizer.state[parameters[name][0]] = values


def join_values(values: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Put together what `optimizer_state` says, apart from tensors, in processes that have different parameters."""
    groups = []
    for same in zip(*(each["groups"] for each in values), strict=True):
        # two processes may have the same parameter
        shapes = {name: shape for group in same for name, shape in zip(group["names"], group["shapes"], strict=True)}
        groups.append({"names": list(shapes), "shapes": list(shapes.values())})
    joined = {name: own for each in values for name, own in each["values"].items()}
    return {"type": values[0]["type"], "groups": groups, "values": joined}


def _shapes(
    parameters: Sequence[Parameter], names: Mapping[Parameter, str], wholes: Mapping[str, Tensor] | None
) -> dict[str, list[int]]:
    own = {_name_of(parameter, names): parameter for parameter in parameters}
    return {name: list((parameter if wholes is None else wholes[name]).shape) for name, parameter in own.items()}


def _name_of(parameter: Parameter, names: Mapping[Parameter, str]) -> str:
    if parameter not in names:
        raise CheckpointError(
            f"the optimizer holds a parameter of shape {tuple(parameter.shape)} that has no name; "
            "build the optimizer from the same model that names come from"
        )
    return names[parameter]


def _check_fit(
    optimizer: torch.optim.Optimizer,
    names: Mapping[Parameter, str],
    saved: Mapping[str, Any],
    wholes: Mapping[str, Tensor] | None,
    elsewhere: Collection[str],
) -> None:
    mend = "resume with the same model, adapter and optimizer settings that the checkpoint was made with"
    if saved["type"] != type(optimizer).__name__:
        raise CheckpointError(
            f"the checkpoint holds the state of {saved['type']}, this run uses {type(optimizer).__name__}; {mend}"
        )
    if len(saved["groups"]) != len(optimizer.param_groups):
        raise CheckpointError(
            f"the checkpoint's optimizer has {len(saved['groups'])} parameter groups, "
            f"this run's has {len(optimizer.param_groups)}; {mend}"
        )
    for index, (group, saved_group) in enumerate(zip(optimizer.param_groups, saved["groups"], strict=True)):
        ours = _shapes(group["params"], names, wholes)
        theirs = dict(zip(saved_group["names"], saved_group["shapes"], strict=True))
        faults = [f"{name} is not in the checkpoint" for name in sorted(ours.keys() - theirs.keys())]
        faults += [f"{name} is not in this run" for name in sorted(theirs.keys() - ours.keys() - set(elsewhere))]
        faults += [
            f"{name} has shape {theirs[name]} in the checkpoint and {ours[name]} in this run"
            for name in sorted(ours.keys() & theirs.keys())
            if ours[name] != theirs[name]
        ]
        if faults:
            more = f" and {len(faults) - 3} more" if len(faults) > 3 else ""
            raise CheckpointError(f"optimizer group {index}: {'; '.join(faults[:3])}{more}; {mend}")
