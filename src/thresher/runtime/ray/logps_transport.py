"""Logps on their way between processes: as numpy arrays, which the object store hands over without a copy."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from thresher.losses.pairs import ChosenRejectedLogps, ResponseLogps


class FlatLogps(NamedTuple):
    """Both sides of some pairs, pair after pair."""

    chosen: npt.NDArray[np.float32]
    chosen_lengths: npt.NDArray[np.int64]
    rejected: npt.NDArray[np.float32]
    rejected_lengths: npt.NDArray[np.int64]


def pack_logps(parts: Sequence[ChosenRejectedLogps]) -> FlatLogps:
    """Join what was scored in several batches."""
    sides = ([part.chosen for part in parts], [part.rejected for part in parts])
    arrays = []
    for side in sides:
        arrays.append(np.concatenate([part.values.float().cpu().numpy() for part in side]))
        arrays.append(np.concatenate([part.lengths.cpu().numpy() for part in side]))
    return FlatLogps(*arrays)


def unpack_logps(flat: FlatLogps, pairs_per_part: Sequence[int], device: torch.device) -> list[ChosenRejectedLogps]:
    """Cut joined logps into parts of so many pairs each. On the CPU they stay where the object store put them."""
    chosen = _cut_side(flat.chosen, flat.chosen_lengths, pairs_per_part, device)
    rejected = _cut_side(flat.rejected, flat.rejected_lengths, pairs_per_part, device)
    return [ChosenRejectedLogps(*sides) for sides in zip(chosen, rejected, strict=True)]


def _cut_side(
    values: npt.NDArray[np.float32],
    lengths: npt.NDArray[np.int64],
    pairs_per_part: Sequence[int],
    device: torch.device,
) -> list[ResponseLogps]:
    borders = np.cumsum([0, *pairs_per_part])
    tokens = np.concatenate([[0], np.cumsum(lengths)])[borders]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")  # nobody writes to logps
        all_values, all_lengths = torch.from_numpy(values).to(device), torch.from_numpy(lengths).to(device)
    return [
        ResponseLogps(all_values[tokens[at] : tokens[at + 1]], all_lengths[borders[at] : borders[at + 1]])
        for at in range(len(pairs_per_part))
    ]
