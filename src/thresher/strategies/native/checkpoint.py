"""The policy's part of a checkpoint: every process writes the parts that no other does, and reads those it needs.

The files do not say how many processes there were, or along which axes: a part knows where in its whole it lies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from thresher.checkpoint.collective_save import Write
from thresher.checkpoint.json_io import load_json, save_json
from thresher.checkpoint.optimizer import join_values, load_optimizer_state, optimizer_state
from thresher.checkpoint.safetensors_io import save_parts
from thresher.checkpoint.sharded import FileNumber, HostCopies, Part, parts_to_write
from thresher.checkpoint.sharded_reader import Box, OwnParts, Shape, StoredTensors
from thresher.checkpoint.state import State
from thresher.checkpoint.weights import STEM, load_weights
from thresher.distributed.sharded_tensor import own_part
from thresher.strategies.native.parallelize import Placement
from thresher.strategies.native.parameters import LocalParameters

_OPTIMIZER = "optimizer"


class PolicyFiles:
    """Weights and optimizer state to and from the files of a checkpoint."""

    def __init__(self, parameters: LocalParameters, optimizer: torch.optim.Optimizer, placement: Placement):
        self._parameters = parameters
        self._optimizer = optimizer
        self._placement = placement

    def capture(self, extra: Mapping[str, Mapping[str, Tensor]], copies: HostCopies | None) -> Write:
        """Take everything as it is now; all processes take part."""
        wholes, everyone = self._parameters.by_name, self._placement.ranks.everyone
        state = optimizer_state(self._optimizer, self._parameters.part_names, wholes)
        moments = {name: _split_like(tensor, wholes[_parameter_of(name)]) for name, tensor in state.tensors.items()}
        parts = {stem: self._parts(tensors, tensors) for stem, tensors in {STEM: wholes, **extra}.items()}
        parts[_OPTIMIZER] = self._parts(state.tensors, moments)
        if copies is not None:
            parts = {stem: _copied(stem, own, copies) for stem, own in parts.items()}
        # of all processes that have the same parameters, one tells what there is to tell of them
        told = everyone.gather(state.values if self._parameters.counts(torch.zeros(())) else None)
        values = None if told is None else join_values([each for each in told if each is not None])
        number = self._file_number(has_something=any(parts.values()))

        def write(directory: Path) -> list[str]:
            names = []
            if number is not None:
                names += [save_parts(directory, stem, own, number) for stem, own in parts.items()]
            if values is not None:
                save_json(directory / f"{_OPTIMIZER}.json", values)
                names.append(f"{_OPTIMIZER}.json")
            return names

        return write

    def load(self, directory: Path) -> None:
        """Restore what any processes wrote, bitwise; all processes take part."""
        wholes = self._parameters.by_name
        elsewhere = self._placement.ranks.everyone.elsewhere(wholes)
        mend = "resume with the same pretrain, master_dtype and lora settings"
        load_weights(directory, wholes, mend=mend, elsewhere=elsewhere)

        def box_of(name: str, shape: Shape) -> Box:
            return own_part(wholes[_parameter_of(name)]) if shape else ()

        values = load_json(directory / f"{_OPTIMIZER}.json")
        with StoredTensors(directory, _OPTIMIZER) as stored:
            state = State(OwnParts(stored, box_of), values)
            load_optimizer_state(self._optimizer, self._parameters.part_names, state, wholes, elsewhere)

    def _parts(self, tensors: Mapping[str, Tensor], places: Mapping[str, Tensor]) -> dict[str, Part]:
        return parts_to_write(tensors, places, self._parameters.counts)

    def _file_number(self, *, has_something: bool) -> FileNumber | None:
        """Number the files among the processes that have something to write: copies of a whole write nothing."""
        everyone = self._placement.ranks.everyone
        writers = [rank for rank, writes in enumerate(everyone.share(has_something)) if writes]
        return FileNumber(writers.index(everyone.rank), len(writers)) if has_something else None


def _parameter_of(name: str) -> str:
    return name.partition("/")[2]


def _split_like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Moments are split as their parameter is; a count of steps is whole everywhere."""
    return parameter if tensor.ndim else tensor


def _copied(stem: str, parts: Mapping[str, Part], copies: HostCopies) -> dict[str, Part]:
    return {name: replace(part, values=copies.take(f"{stem}/{name}", part.values)) for name, part in parts.items()}
