"""Load a checkpoint's weights into parameters: every name, shape and dtype must match, or nothing is copied."""

from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from torch import Tensor

from thresher.checkpoint.sharded_reader import ShardedReader
from thresher.distributed.sharded_tensor import local_slices, to_local
from thresher.errors import CheckpointError

STEM = "weights"
Spec = tuple[tuple[int, ...], torch.dtype]


@torch.no_grad()
def load_weights(
    directory: Path,
    parameters: Mapping[str, Tensor],
    *,
    hint: str,
    stem: str = STEM,
    other_rank_names: Collection[str] = (),
) -> None:
    """Copy a checkpoint's weights, bitwise; of a sharded parameter, the local shard.

    hint: what to do if the weights belong to another model, for the error message.
    other_rank_names: names of parameters that only other ranks have.
    """
    with ShardedReader(directory, stem) as reader:
        expected = {name: (tuple(parameter.shape), parameter.dtype) for name, parameter in parameters.items()}
        check_specs(directory, reader.specs(), expected, hint=hint, other_rank_names=other_rank_names)
        for name, parameter in parameters.items():
            to_local(parameter).copy_(reader.read(name, local_slices(parameter)))


def check_specs(
    directory: Path,
    found: Mapping[str, Spec],
    expected: Mapping[str, Spec],
    *,
    hint: str,
    other_rank_names: Collection[str],
) -> None:
    """Reject the weights of another model: shapes and dtypes by name must be those of this run."""
    names = {*found, *expected}.difference(other_rank_names) | expected.keys()
    different = sorted(name for name in names if found.get(name) != expected.get(name))
    if different:
        raise CheckpointError(
            f"the checkpoint in {directory} was made for another model: {len(different)} weights differ, such as "
            f"{different[0]}; {hint}"
        )
