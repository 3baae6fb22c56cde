"""State of the global random generators of every rank: Python, NumPy (legacy), torch on CPU and on CUDA devices.

Generators made with `numpy.random.default_rng` are not covered; the code that creates them saves them.
"""

import random
from collections.abc import Sequence

import numpy as np
import torch

from thresher.checkpoint.state import State
from thresher.errors import CheckpointError


def capture_rng() -> State:
    """Copy the state of every global generator."""
    version, words, gauss_next = random.getstate()
    legacy = np.random.get_state(legacy=False)
    if not isinstance(legacy, dict) or legacy["bit_generator"] != "MT19937":
        raise CheckpointError(
            "NumPy's global generator was replaced, and only the default MT19937 can be saved; do not replace it"
        )
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
