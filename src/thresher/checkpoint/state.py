"""Saved state of weights, optimizer and random generators: tensors by name, and plain JSON values."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from thresher.checkpoint.json_io import load_json, save_json
from thresher.checkpoint.tensor_files import ShardedReader, load_tensors, save_tensors
from thresher.checkpoint.tensor_index import Specs
from thresher.distributed.tensors import local_slices, to_local
from thresher.errors import CheckpointError

STEM = "weights"
# what the averages of schedulefree depend on, which it keeps per group
_GROUP_STATE = ("k", "weight_sum", "lr_max")


class State(NamedTuple):
    """Tensors, and the values that are not tensors."""

    tensors: Mapping[str, Tensor]
    values: Mapping[str, Any]


def save_state(directory: Path, stem: str, state: State) -> list[str]:
    """Write `<stem>.safetensors` and `<stem>.json`; return the file names."""
    name = save_tensors(directory, stem, state.tensors)
    save_json(directory / f"{stem}.json", state.values)
    return [name, f"{stem}.json"]


def load_state(directory: Path, stem: str) -> State:
    """Read the files that `save_state` wrote for this stem."""
    return State(load_tensors(directory, stem), load_json(directory / f"{stem}.json"))


@torch.no_grad()
def load_weights(
    directory: Path,
    parameters: Mapping[str, Tensor],
    *,
    hint: str,  # what to do if the weights belong to a different model, for the error message
    stem: str = STEM,
    other_rank_names: Collection[str] = (),  # of parameters that only other ranks have
) -> None:
    """Copy a checkpoint's weights bitwise, the local shards of sharded ones; copy nothing if one does not match."""
    with ShardedReader(directory, stem) as reader:
        expected = {name: (tuple(parameter.shape), parameter.dtype) for name, parameter in parameters.items()}
        check_specs(directory, reader.specs(), expected, hint=hint, other_rank_names=other_rank_names)
        reader.read_into({name: (to_local(each), local_slices(each)) for name, each in parameters.items()})


def weight_names(directory: Path) -> list[str]:
    """List the parameters that a checkpoint has the weights of: the trained ones."""
    with ShardedReader(directory, STEM) as reader:
        return list(reader.specs())


def check_specs(
    directory: Path, found: Specs, expected: Specs, *, hint: str, other_rank_names: Collection[str]
) -> None:
    """Reject weights of a different model: shapes and dtypes by name must match this run's."""
    names = {*found, *expected}.difference(other_rank_names) | expected.keys()
    if different := sorted(name for name in names if found.get(name) != expected.get(name)):
        raise CheckpointError(
            f"the checkpoint in {directory} was made for a different model: {len(different)} weights differ, such as "
            f"{different[0]}; {hint}"
        )


def optimizer_state(
    optimizer: torch.optim.Optimizer,
    names: Mapping[Parameter, str],
    full_parameters: Mapping[str, Tensor] | None = None,
) -> State:
    """Collect an optimizer's state by parameter name; a parameter without state is listed without values.

    torch keys it by position, so a reordered model would silently swap moments, and casts it to the parameter's dtype
    on load, so fp32 moments of bf16 parameters would lose bits. Tensors are named `<state>/<parameter>`; the rest is
    JSON. If the optimizer works on local shards of parameters, its tensors are shards, and the stored shapes are the
    shapes of `full_parameters`.
    """
    tensors: dict[str, Tensor] = {}
    values: dict[str, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        shapes = _shapes(group["params"], names, full_parameters)
        kept = {key: group[key] for key in _GROUP_STATE if key in group}
        groups.append({"names": list(shapes), "shapes": list(shapes.values()), **kept})
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
    """Replace an optimizer's state by a saved one, bit for bit; change nothing if it does not match.

    The optimizer keeps its hyper-parameters: the user may have changed them in the config on purpose.
    """
    saved = state.values
    groups = [_shapes(group["params"], names, full_parameters) for group in optimizer.param_groups]
    check_groups(saved, type(optimizer).__name__, groups, other_rank_names)
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
    for group, saved_group in zip(optimizer.param_groups, saved["groups"], strict=True):
        group.update({key: saved_group[key] for key in _GROUP_STATE if key in saved_group})


def join_values(values: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the non-tensor parts of `optimizer_state` from ranks that have different parameters."""
    groups = []
    for same_group in zip(*(each["groups"] for each in values), strict=True):
        # a dict, because two ranks may have the same parameter
        shapes = {name: shape for each in same_group for name, shape in zip(each["names"], each["shapes"], strict=True)}
        groups.append({**same_group[0], "names": list(shapes), "shapes": list(shapes.values())})
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
        problem = f"a parameter of shape {tuple(parameter.shape)} in the optimizer has no name"
        raise CheckpointError(f"{problem}; build the optimizer from the model that the names come from")
    return names[parameter]


def check_groups(
    saved: Mapping[str, Any], kind: str, groups: Sequence[Mapping[str, list[int]]], other_rank_names: Collection[str]
) -> None:
    """Reject the state of a different optimizer: its kind, and each group's shapes by name, must match this run's."""
    hint = "resume with the same model, adapter, optimizer and param_groups as the checkpoint"
    if saved["type"] != kind:
        raise CheckpointError(f"the checkpoint has the state of {saved['type']}, this run uses {kind}; {hint}")
    if (num_saved := len(saved["groups"])) != len(groups):
        counts = f"the checkpoint's optimizer has {num_saved} parameter groups, this run's has {len(groups)}"
        raise CheckpointError(f"{counts}; {hint}")
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


def capture_rng() -> State:
    """Copy the state of every global generator: Python, NumPy (legacy), torch on the CPU and on CUDA devices.

    Generators made with `numpy.random.default_rng` are not covered; the code that creates them saves them.
    """
    version, words, gauss_next = random.getstate()
    legacy = np.random.get_state(legacy=False)
    if not isinstance(legacy, dict) or legacy["bit_generator"] != "MT19937":
        problem = "NumPy's global generator was replaced, and only the default MT19937 can be saved"
        raise CheckpointError(f"{problem}; do not replace it")
    tensors = {
        "python": torch.tensor(words, dtype=torch.int64),
        "numpy": torch.from_numpy(legacy["state"]["key"].astype(np.int64)),
        "torch": torch.get_rng_state(),
    }
    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    tensors |= {f"cuda.{index}": torch.cuda.get_rng_state(index) for index in range(num_devices)}
    values = {
        "python": {"version": version, "gauss_next": gauss_next},
        "numpy": {
            "pos": int(legacy["state"]["pos"]),
            "has_gauss": int(legacy["has_gauss"]),
            "gauss": float(legacy["gauss"]),
        },
        "num_cuda_devices": num_devices,
    }
    return State(tensors, values)


def restore_rng(state: State) -> list[str]:
    """Set every global generator; return a note if the number of CUDA devices has changed."""
    tensors, values = state
    python = values["python"]
    random.setstate((python["version"], tuple(tensors["python"].tolist()), python["gauss_next"]))
    np.random.set_state(
        {
            "bit_generator": "MT19937",
            "state": {"key": tensors["numpy"].numpy().astype(np.uint32), "pos": values["numpy"]["pos"]},
            "has_gauss": values["numpy"]["has_gauss"],
            "gauss": values["numpy"]["gauss"],
        }
    )
    torch.set_rng_state(tensors["torch"].cpu())
    num_saved = values["num_cuda_devices"]
    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for index in range(min(num_saved, num_devices)):
        torch.cuda.set_rng_state(tensors[f"cuda.{index}"].cpu(), index)
    if num_saved == num_devices:
        return []
    return [f"the checkpoint has the RNG state of {num_saved} CUDA devices, and this process has {num_devices}"]


def merge_rng(states: Sequence[State]) -> State:
    """Merge the states of all ranks; rank 0 keeps the names that a single process uses."""
    tensors = {_name(rank, name): tensor for rank, state in enumerate(states) for name, tensor in state.tensors.items()}
    others = [dict(state.values) for state in states[1:]]
    return State(tensors, {**states[0].values, **({"other_ranks": others} if others else {})})


def restore_rng_of_rank(merged: State, rank: int, num_ranks: int) -> list[str]:
    """Set this rank's generators from `merge_rng`; a rank that is not in the checkpoint keeps its new streams."""
    values = [merged.values, *merged.values.get("other_ranks", [])]
    notes = []
    if rank == 0 and len(values) != num_ranks:
        effect = f"ranks from {len(values)} on start new streams" if num_ranks > len(values) else "the rest is not used"
        notes = [f"the checkpoint has the RNG state of {len(values)} ranks, and this run has {num_ranks}: {effect}"]
    if rank >= len(values):
        return notes
    prefix = _name(rank, "")
    names = [name for name in merged.tensors if name.startswith(prefix) and (rank or not name.startswith("rank."))]
    tensors = {name.removeprefix(prefix): merged.tensors[name] for name in names}
    return notes + restore_rng(State(tensors, values[rank]))


def _name(rank: int, name: str) -> str:
    return f"rank.{rank}.{name}" if rank else name
