"""Read the weights of a Megatron-Core model from the safetensors files of transformers: each rank only its slices."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from thresher.models.loading.load_sharded import SafetensorsReader
from thresher.strategies.megatron.model import MegatronPairModel
from thresher.strategies.megatron.parameter_state import ParameterState
from thresher.strategies.megatron.weights import EMBEDDING, HEAD, Piece

_STACKED_EXPERTS = re.compile(r"(.+\.mlp\.experts\.)(gate_up_proj|down_proj)")


@torch.no_grad()
def load_weights(chunks: Iterable[MegatronPairModel], path: str) -> None:
    """Fill every parameter of the model chunks of this process."""
    for chunk in chunks:
        reader = _open(chunk, path)
        for name, parameter in chunk.named_parameters():
            _read(chunk, reader, name, parameter.data)


@torch.no_grad()
def load_masters(chunks: Iterable[MegatronPairModel], path: str, states: Sequence[ParameterState]) -> None:
    """Fill the fp32 weights of an optimizer, which it has copied from 16-bit parameters."""
    state_of = {state.parameter: state for state in states}
    for chunk in chunks:
        reader = _open(chunk, path)
        for name, parameter in chunk.named_parameters():
            if (state := state_of.get(parameter)) is not None:
                whole = torch.empty(parameter.shape, dtype=torch.float32)
                _read(chunk, reader, name, whole)
                state.assign(whole, {}, None)


def _open(chunk: MegatronPairModel, path: str) -> SafetensorsReader:
    return SafetensorsReader(path, {HEAD: EMBEDDING} if chunk.description.ties_embeddings else {})


def _read(chunk: MegatronPairModel, reader: SafetensorsReader, name: str, into: Tensor) -> None:
    into.zero_()  # the padding of the vocabulary
    for piece in chunk.weight_map.pieces(name, into):
        for stored in _as_stored(piece, reader):
            stored.copy_(reader.read_slices(stored.hf_name, stored.hf_shape, stored.slices))


def _as_stored(piece: Piece, reader: SafetensorsReader) -> Iterator[Piece]:
    """Split a piece of stacked experts by the files' tensors, of which each expert has its own."""
    match = _STACKED_EXPERTS.fullmatch(piece.hf_name)
    if match is None or reader.has(piece.hf_name):
        yield piece
        return
    experts, _, columns = piece.slices
    projections = ("gate_proj", "up_proj") if match[2] == "gate_up_proj" else ("down_proj",)
    rows = piece.hf_shape[1] // len(projections)
    for index, expert in enumerate(range(experts.start, experts.stop)):
        for at, projection in enumerate(projections):
            name = f"{match[1]}{expert}.{projection}.weight"
            local = piece.local[index, at * rows : (at + 1) * rows]
            yield Piece(name, (rows, piece.hf_shape[2]), (slice(0, rows), columns), local, piece.axis)
