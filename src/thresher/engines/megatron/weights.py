"""Map between Megatron-Core parameters of one process and the tensors of transformers.

A parameter of Megatron-Core is a list of pieces, each a slice of one transformers tensor. The same map loads weights,
each rank only its slices, writes them back, and names optimizer moments and gradients.

Megatron-Core's layout: query, key and value rows alternate by query group, gate and up are stacked, layers are numbered
within a model chunk, and the vocabulary is padded to a multiple of the tensor-parallel size.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from thresher.models.loading.load_sharded import SafetensorsReader

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
_STACKED_EXPERTS = re.compile(r"(.+\.mlp\.experts\.)(gate_up_proj|down_proj)")
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
# parameters that every tensor-parallel rank holds in full
_REPLICATED = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.router.weight": "mlp.gate.weight",
}
# matrices of which each tensor-parallel rank has some columns
_BY_COLUMNS = {
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
}

Slices = tuple[slice, ...]


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a transformers model; num_experts is 0 for a dense model."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    num_experts: int = 0
    expert_ffn_size: int = 0

    @property
    def heads_per_group(self) -> int:
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True)
class Piece:
    """A slice of a transformers tensor inside a Megatron-Core parameter."""

    # the transformers parameter, as in `named_parameters`
    hf_name: str
    hf_shape: tuple[int, ...]
    # the part that this piece holds
    slices: Slices
    # a view of the Megatron-Core tensor with the same elements in the same order, of any shape
    local: Tensor
    # the mesh dimension along which processes hold different slices of hf_name; None: all hold the same
    mesh_dim: str | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(each.stop - each.start for each in self.slices)

    def values(self) -> Tensor:
        """Return the values in the shape of the slice; a copy unless the slice is contiguous in the parameter."""
        return self.local.reshape(self.shape)

    def copy_(self, values: Tensor) -> None:
        """Set the values from a tensor in the shape of the slice."""
        self.local.copy_(values.reshape(self.local.shape))


# the pieces of a given parameter, in a tensor of its shape
PiecesOf = Callable[[Tensor], list[Piece]]


@dataclass(frozen=True)
class WeightMap:
    """The pieces of every parameter of one model chunk, for this process's ranks."""

    shape: ModelShape
    tp_rank: int = 0
    tp_size: int = 1
    ep_rank: int = 0
    ep_size: int = 1
    # of the chunk
    first_layer: int = 0
    ties_embeddings: bool = False

    def pieces(self, name: str, tensor: Tensor) -> list[Piece]:
        """List the pieces of a parameter, or of a tensor of its shape such as its gradient."""
        if name == "embedding.word_embeddings.weight":
            return self._vocab_rows(EMBEDDING, tensor)
        if name == "output_layer.weight":  # the last stage of a pipeline has a copy of a tied embedding
            return self._vocab_rows(EMBEDDING if self.ties_embeddings else HEAD, tensor)
        if name == "decoder.final_layernorm.weight":
            return whole("model.norm.weight", tensor)
        match = _LAYER.fullmatch(name)
        pieces = None if match is None else self._layer_pieces(int(match[1]), match[2], tensor)
        if pieces is None:
            raise KeyError(f"Megatron-Core parameter {name} has no counterpart in transformers")
        return pieces

    def over_tp(self, hf_name: str, dim: int, tensor: Tensor) -> list[Piece]:
        """A part of a transformers tensor that the tensor-parallel ranks split along a dimension."""
        return [_part(hf_name, dim, tensor, self.tp_rank, self.tp_size, "tp")]

    def _layer_pieces(self, index: int, name: str, tensor: Tensor) -> list[Piece] | None:
        prefix = f"model.layers.{self.first_layer + index}."
        if name in _REPLICATED:
            return whole(prefix + _REPLICATED[name], tensor)
        if name in _BY_COLUMNS:
            return self.over_tp(prefix + _BY_COLUMNS[name], 1, tensor)
        if name in ("mlp.experts.gate_up_proj", "mlp.experts.down_proj"):
            return [_part(prefix + name, 0, tensor, self.ep_rank, self.ep_size, "ep")]
        if name == "mlp.linear_fc1.weight":
            gate, up = tensor.chunk(2)
            gates = self.over_tp(f"{prefix}mlp.gate_proj.weight", 0, gate)
            return gates + self.over_tp(f"{prefix}mlp.up_proj.weight", 0, up)
        if name in ("self_attention.linear_qkv.weight", "self_attention.linear_qkv.bias"):
            return list(self._qkv(prefix, tensor))
        return None

    def _vocab_rows(self, hf_name: str, tensor: Tensor) -> list[Piece]:
        start = self.tp_rank * len(tensor)
        rows = min(len(tensor), self.shape.vocab_size - start)
        hf_shape = (self.shape.vocab_size, self.shape.hidden_size)
        return [_rows(hf_name, hf_shape, start, tensor[:rows])] if rows > 0 else []

    def _qkv(self, prefix: str, tensor: Tensor) -> Iterator[Piece]:
        """Rows of a query group: its query heads, then its key head, then its value head."""
        shape = self.shape
        suffix = "bias" if tensor.ndim == 1 else "weight"
        query_rows, head_rows = shape.heads_per_group * shape.head_dim, shape.head_dim
        group_rows = query_rows + 2 * head_rows
        in_group = {
            "q_proj": (0, query_rows),
            "k_proj": (query_rows, head_rows),
            "v_proj": (query_rows + head_rows, head_rows),
        }
        for projection, (offset, rows) in in_group.items():
            hf_name = f"{prefix}self_attn.{projection}.{suffix}"
            hf_shape = (shape.num_kv_heads * rows, *tensor.shape[1:])
            if shape.num_kv_heads % self.tp_size == 0:
                groups = shape.num_kv_heads // self.tp_size
                view = tensor.view(groups, group_rows, *tensor.shape[1:])[:, offset : offset + rows]
                yield _rows(hf_name, hf_shape, self.tp_rank * groups * rows, view, rows=groups * rows)
                continue
            # several ranks share a group: each holds consecutive rows of it
            group, first = divmod(self.tp_rank * len(tensor), group_rows)
            start, stop = max(first, offset), min(first + len(tensor), offset + rows)
            if start < stop:
                yield _rows(hf_name, hf_shape, group * rows + start - offset, tensor[start - first : stop - first])


def whole(hf_name: str, tensor: Tensor) -> list[Piece]:
    """A transformers tensor that this process has in full."""
    return [Piece(hf_name, tuple(tensor.shape), tuple(slice(0, size) for size in tensor.shape), tensor)]


def _part(hf_name: str, dim: int, tensor: Tensor, rank: int, size: int, mesh_dim: str) -> Piece:
    shape, slices = list(tensor.shape), [slice(0, length) for length in tensor.shape]
    slices[dim] = slice(rank * shape[dim], (rank + 1) * shape[dim])
    shape[dim] *= size
    return Piece(hf_name, tuple(shape), tuple(slices), tensor, mesh_dim)


def _rows(hf_name: str, hf_shape: tuple[int, ...], start: int, local: Tensor, *, rows: int | None = None) -> Piece:
    """A piece of consecutive rows and all columns."""
    rows = len(local) if rows is None else rows
    return Piece(hf_name, hf_shape, (slice(start, start + rows), *(slice(0, n) for n in hf_shape[1:])), local, "tp")


def open_weights(path: str, *, ties_embeddings: bool) -> SafetensorsReader:
    return SafetensorsReader(path, {HEAD: EMBEDDING} if ties_embeddings else {})


@torch.no_grad()
def read_pieces(reader: SafetensorsReader, pieces: Iterable[Piece]) -> None:
    """Fill local tensors with the slices of transformers' tensors that they are."""
    for piece in pieces:
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
            yield Piece(name, (rows, piece.hf_shape[2]), (slice(0, rows), columns), local, piece.mesh_dim)
