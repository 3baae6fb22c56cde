"""LoRA on the fused linear layers of Megatron-Core: one A and B per linear layer of transformers, equal to PEFT.

PEFT itself decides on a meta model which layers get an adapter, and with which rank and scale. The query, key and value
of a layer, or its gate and up, are parts of one matrix in Megatron-Core; their adapters stay separate.

    layer                             A                             B
    column-parallel (q k v gate up)   replicated                    sharded over tp by rows
    row-parallel (o down)             sharded over tp by columns    replicated

With sequence parallelism a replicated matrix sees only the rows of its rank, so its gradient is summed over tp by
finalize_model_grads, like a norm's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from torch import Tensor, nn

from thresher.errors import UserError
from thresher.strategies.megatron.model import MegatronPairModel
from thresher.strategies.megatron.weights import ModelShape, Piece

_MODULE = "lora"
# linear layer of Megatron-Core -> its parts, as transformers names them
_COLUMN_PARALLEL = {
    "self_attention.linear_qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.linear_fc1": ("mlp.gate_proj", "mlp.up_proj"),
}
_ROW_PARALLEL = {"self_attention.linear_proj": "self_attn.o_proj", "mlp.linear_fc2": "mlp.down_proj"}


@dataclass(frozen=True)
class Adapter:
    """The adapter of one linear layer of transformers. name: of the layer in the model; scale: alpha / rank."""

    name: str
    rank: int
    scale: float


def list_adapters(peft_model: nn.Module) -> dict[str, Adapter]:
    """Return the adapters that PEFT has attached to a model, which may be on the meta device, by layer."""
    base: Any = peft_model.get_base_model()  # type: ignore[operator]
    return {
        name: Adapter(name, module.r["default"], float(module.scaling["default"]))
        for name, module in base.named_modules()
        if hasattr(module, "lora_A")
    }


class _AdapterPart(nn.Module):
    """A and B of one linear layer of transformers; the local shard of one of them."""

    def __init__(self, adapter: Adapter, in_size: int, out_size: int, like: Tensor):
        super().__init__()
        self.adapter = adapter
        options: dict[str, Any] = {"dtype": like.dtype, "device": like.device}
        self.a = nn.Parameter(torch.zeros(adapter.rank, in_size, **options))
        self.b = nn.Parameter(torch.zeros(out_size, adapter.rank, **options))

    def mark_sharded(self, sharded: nn.Parameter, replicated: nn.Parameter, dim: int, sequence_parallel: bool) -> None:
        set_tensor_model_parallel_attributes(sharded, True, dim, 1)
        replicated.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]

    def forward(self, rows: Tensor, communicate: Callable[[Tensor], Tensor]) -> Tensor:
        return F.linear(communicate(F.linear(rows, self.a)), self.b) * self.adapter.scale


class _ColumnAdapters(nn.Module):
    """Adapters of the parts of a column-parallel layer; parts without one add zeros."""

    def __init__(self, parts: Sequence[_AdapterPart | None], sizes: Sequence[int], num_groups: int, is_sharded: bool):
        """sizes: local outputs of each part. num_groups: blocks of the output, each with rows of every part."""
        super().__init__()
        self.parts = nn.ModuleDict({str(index): part for index, part in enumerate(parts) if part is not None})
        self._sizes, self._num_groups, self._is_sharded = sizes, num_groups, is_sharded

    def forward(self, rows: Tensor) -> Tensor:
        communicate = gather_from_sequence_parallel_region if self._is_sharded else copy_to_tensor_model_parallel_region
        added = {int(index): part(rows, communicate) for index, part in self.parts.items()}
        like = next(iter(added.values()))
        blocks = [
            added[index] if index in added else like.new_zeros(*like.shape[:-1], size)
            for index, size in enumerate(self._sizes)
        ]
        grouped = [block.unflatten(-1, (self._num_groups, -1)) for block in blocks]
        return torch.cat(grouped, dim=-1).flatten(-2)


class _RowAdapters(nn.Module):
    """The adapter of a row-parallel layer."""

    def __init__(self, part: _AdapterPart, is_sharded: bool):
        super().__init__()
        self.part = part
        self._is_sharded = is_sharded

    def forward(self, rows: Tensor) -> Tensor:
        communicate = (
            reduce_scatter_to_sequence_parallel_region if self._is_sharded else reduce_from_tensor_model_parallel_region
        )
        out: Tensor = self.part(rows, communicate)
        return out


class ChunkAdapters:
    """The adapters of one model chunk; attaching them freezes all other parameters."""

    def __init__(self, chunk: MegatronPairModel, adapters: Mapping[str, Adapter]):
        self._is_enabled = True
        self._pieces: dict[str, tuple[str, tuple[int, ...], tuple[slice, ...]]] = {}
        chunk.requires_grad_(False)
        names = {module: name for name, module in chunk.named_modules()}
        for index, layer in enumerate(chunk.decoder.layers):
            prefix = f"model.layers.{chunk.weight_map.at.first_layer + index}."
            for target in (*_COLUMN_PARALLEL, *_ROW_PARALLEL):
                linear = _find(layer, target)
                if linear is None:
                    continue
                if target in _COLUMN_PARALLEL:
                    hf_names = [prefix + name for name in _COLUMN_PARALLEL[target]]
                    self._attach_column(chunk, names[linear], linear, [adapters.get(name) for name in hf_names])
                elif (adapter := adapters.get(prefix + _ROW_PARALLEL[target])) is not None:
                    self._attach_row(chunk, names[linear], linear, adapter)
        if chunk.pre_process:
            # the re-entrant checkpoint of Megatron-Core gives no gradient to layers whose input needs none
            chunk.embedding.register_forward_hook(_require_grad)

    def pieces(self, name: str, tensor: Tensor) -> list[Piece]:
        """The piece of a PEFT parameter that a parameter of an adapter holds, or a tensor of its shape."""
        hf_name, hf_shape, slices = self._pieces[name]
        is_whole = all(each.stop - each.start == size for each, size in zip(slices, hf_shape, strict=True))
        return [Piece(hf_name, hf_shape, slices, tensor, None if is_whole else "tp")]

    def has(self, name: str) -> bool:
        return name in self._pieces

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Compute the base model within a `with` block."""
        self._is_enabled = False
        try:
            yield
        finally:
            self._is_enabled = True

    def _attach_column(
        self, chunk: MegatronPairModel, name: str, linear: Any, adapters: Sequence[Adapter | None]
    ) -> None:
        if not any(adapters):
            return
        at, sequence_parallel = chunk.weight_map.at, chunk.config.sequence_parallel
        sizes, num_groups = _part_sizes(chunk.description.shape, len(adapters), at.tp_size)
        parts: list[_AdapterPart | None] = []
        for index, (adapter, size) in enumerate(zip(adapters, sizes, strict=True)):
            if adapter is None:
                parts.append(None)
                continue
            part = _AdapterPart(adapter, linear.input_size, size, linear.weight)
            part.mark_sharded(part.b, part.a, 0, sequence_parallel)
            rows = slice(at.tp_rank * size, (at.tp_rank + 1) * size)
            self._name(f"{name}.{_MODULE}.parts.{index}", part, (size * at.tp_size, linear.input_size), rows, None)
            parts.append(part)
        self._hook(linear, _ColumnAdapters(parts, sizes, num_groups, sequence_parallel))

    def _attach_row(self, chunk: MegatronPairModel, name: str, linear: Any, adapter: Adapter) -> None:
        at, sequence_parallel = chunk.weight_map.at, chunk.config.sequence_parallel
        out_size, in_size = linear.weight.shape
        part = _AdapterPart(adapter, in_size, out_size, linear.weight)
        part.mark_sharded(part.a, part.b, 1, sequence_parallel)
        columns = slice(at.tp_rank * in_size, (at.tp_rank + 1) * in_size)
        self._name(f"{name}.{_MODULE}.part", part, (out_size, in_size * at.tp_size), None, columns)
        self._hook(linear, _RowAdapters(part, sequence_parallel))

    def _name(
        self, name: str, part: _AdapterPart, size: tuple[int, int], rows: slice | None, columns: slice | None
    ) -> None:
        """Remember the PEFT names and slices of both matrices; size: of the matrix of transformers."""
        rank, (out_size, in_size) = slice(0, part.adapter.rank), size
        prefix = f"base_model.model.{part.adapter.name}."
        a = (f"{prefix}lora_A.default.weight", (rank.stop, in_size), (rank, columns or slice(0, in_size)))
        b = (f"{prefix}lora_B.default.weight", (out_size, rank.stop), (rows or slice(0, out_size), rank))
        self._pieces |= {f"{name}.a": a, f"{name}.b": b}

    def _hook(self, linear: nn.Module, module: nn.Module) -> None:
        linear.add_module(_MODULE, module)

        def add(_: nn.Module, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
            out, bias = outputs
            return (out + module(inputs[0]) if self._is_enabled else out), bias

        linear.register_forward_hook(add)


def check_adapters(adapters: Mapping[str, Adapter], chunks: Sequence[MegatronPairModel]) -> None:
    """Reject adapters of layers that Megatron-Core has no place for."""
    known = {*(name for parts in _COLUMN_PARALLEL.values() for name in parts), *_ROW_PARALLEL.values()}
    others = [name for name in adapters if ".".join(name.split(".")[-2:]) not in known]
    if others:
        raise UserError(
            f"lora_target matches {others[0]}, which cannot have an adapter under megatron_train; use q_proj, k_proj, "
            "v_proj, o_proj, gate_proj, up_proj or down_proj"
        )
    shape, tp_size = chunks[0].description.shape, chunks[0].groups.tp.size
    if shape.num_kv_heads % tp_size:
        raise UserError(
            f"LoRA needs a tensor_model_parallel_size that divides the {shape.num_kv_heads} key/value heads, and it is "
            f"{tp_size}; use a smaller one"
        )


def _part_sizes(shape: ModelShape, num_parts: int, tp_size: int) -> tuple[list[int], int]:
    """Local outputs of the parts of a column-parallel layer, and the number of blocks in which they alternate."""
    if num_parts == len(_COLUMN_PARALLEL["mlp.linear_fc1"]):
        return [shape.ffn_size // tp_size] * num_parts, 1
    groups = shape.num_kv_heads // tp_size
    head_rows = groups * shape.head_dim
    return [shape.heads_per_group * head_rows, head_rows, head_rows], groups


def _find(layer: nn.Module, path: str) -> nn.Module | None:
    try:
        return layer.get_submodule(path)
    except AttributeError:  # experts have no such layer
        return None


def _require_grad(_: nn.Module, __: Any, hidden: Tensor) -> Tensor:
    return hidden.requires_grad_() if torch.is_grad_enabled() else hidden
