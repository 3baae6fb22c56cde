"""Weights of a checkpoint into the parameters of a model: all of them, each of its own shape and dtype, or none."""

from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from torch import Tensor

from thresher.checkpoint.sharded_reader import ShardedReader
from thresher.distributed.sharded_tensor import local_slices, to_local
from thresher.errors import CheckpointError

STEM = "weights"


@torch.no_grad()
def load_weights(
    directory: Path,
    parameters: Mapping[str, Tensor],
    *,
    mend: str,
    stem: str = STEM,
    elsewhere: Collection[str] = (),
) -> None:
    """Copy a checkpoint's weights, bitwise: of a split parameter the part that is here.

    `mend` tells a person what to do where they belong to another model; `elsewhere` are names that other processes of
    the run have.
    """
    with ShardedReader(directory, stem) as stored:
        expected = {name: (tuple(parameter.shape), parameter.dtype) for name, parameter in parameters.items()}
        found = stored.kinds()
        names = {*found, *expected}.difference(elsewhere) | expected.keys()
        odd = sorted(name for name in names if found.get(name) != expected.get(name))
        if odd:
            raise CheckpointError(
                f"the checkpoint in {directory} was made for another model: {len(odd)} weights differ, such as "
                f"{odd[0]}; {mend}"
            )
        for name, parameter in parameters.items():
            to_local(parameter).copy_(stored.read(name, local_slices(parameter)))
