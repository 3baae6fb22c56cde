"""Transfer of logps between processes as NumPy arrays, which Ray's object store shares without copying."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from thresher.distributed.tensors import copy_to_device
from thresher.losses.pairs import ChosenRejectedLogps, ResponseLogps


class FlatLogps(NamedTuple):
    """Both sides of some pairs, concatenated pair by pair."""

    chosen: npt.NDArray[np.float32]
    chosen_lengths: npt.NDArray[np.int64]
    rejected: npt.NDArray[np.float32]
    rejected_lengths: npt.NDArray[np.int64]


def pack_logps(batches: Sequence[ChosenRejectedLogps]) -> FlatLogps:
    """Concatenate the logps of several batches."""
    arrays = []
    for side in ([batch.chosen for batch in batches], [batch.rejected for batch in batches]):
        arrays.append(np.concatenate([batch.values.float().cpu().numpy() for batch in side]))
        arrays.append(np.concatenate([batch.lengths.cpu().numpy() for batch in side]))
    return FlatLogps(*arrays)


def unpack_logps(flat: FlatLogps, pairs_per_batch: Sequence[int], device: torch.device) -> list[ChosenRejectedLogps]:
    """Split concatenated logps into batches. On the CPU the results are views of the object store's memory."""
    chosen = _unpack_side(flat.chosen, flat.chosen_lengths, pairs_per_batch, device)
    rejected = _unpack_side(flat.rejected, flat.rejected_lengths, pairs_per_batch, device)
    return [ChosenRejectedLogps(*sides) for sides in zip(chosen, rejected, strict=True)]


def _unpack_side(
    values: npt.NDArray[np.float32],
    lengths: npt.NDArray[np.int64],
    pairs_per_batch: Sequence[int],
    device: torch.device,
) -> list[ResponseLogps]:
    bounds = np.cumsum([0, *pairs_per_batch])
    tokens = np.concatenate([[0], np.cumsum(lengths)])[bounds]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")  # logps are read-only
        all_values, all_lengths = (copy_to_device(torch.from_numpy(each), device) for each in (values, lengths))
    return [
        ResponseLogps(all_values[tokens[at] : tokens[at + 1]], all_lengths[bounds[at] : bounds[at + 1]])
        for at in range(len(pairs_per_batch))
    ]
