"""The random generators of every rank: Python's, NumPy's legacy one, torch's on CPU and CUDA devices.

`numpy.random.default_rng` generators belong to whoever made them and are not covered.
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
        raise CheckpointError("NumPy's global generator was replaced; only its default, MT19937, can be saved")
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
    """Set every global generator; say so where CUDA streams could not continue on other devices."""
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
    return [f"the checkpoint holds random streams of {num_saved} CUDA devices and {num_devices} are here now"]


def merge_rng(states: Sequence[State]) -> State:
    """Put the streams of all ranks into one state; rank 0's lie there as those of one process would."""
    tensors = {_name(rank, name): tensor for rank, state in enumerate(states) for name, tensor in state.tensors.items()}
    others = [dict(state.values) for state in states[1:]]
    return State(tensors, {**states[0].values, **({"other_ranks": others} if others else {})})


def restore_rng_of_rank(joined: State, rank: int, num_ranks: int) -> list[str]:
    """Set this rank's generators from `merge_rng`; a rank that the checkpoint does not know keeps its fresh streams."""
    every = [joined.values, *joined.values.get("other_ranks", [])]
    notes = []
    if rank == 0 and len(every) != num_ranks:
        fate = f"ranks from {len(every)} on draw new ones" if num_ranks > len(every) else "the others are not used"
        notes = [f"the checkpoint holds random streams of {len(every)} ranks and {num_ranks} train now: {fate}"]
    if rank >= len(every):
        return notes
    prefix = _name(rank, "")
    names = [name for name in joined.tensors if name.startswith(prefix) and (rank or not name.startswith("rank."))]
    own = {name.removeprefix(prefix): joined.tensors[name] for name in names}
    return notes + restore_rng(State(own, every[rank]))


def _name(rank: int, name: str) -> str:
    return f"rank.{rank}.{name}" if rank else name
