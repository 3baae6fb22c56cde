"""State of one component: tensors by name, and plain JSON values."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from thresher.checkpoint.json_io import load_json, save_json
from thresher.checkpoint.safetensors_io import save_tensors
from thresher.checkpoint.sharded_reader import load_tensors


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
