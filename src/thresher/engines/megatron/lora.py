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
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from torch import Tensor, nn

from thresher.engines.megatron.model import MegatronPairModel
from thresher.engines.megatron.transformer_config import check_adapted_heads
from thresher.engines.megatron.weights import ModelShape, PiecesOf, whole
from thresher.errors import UserError

# linear layer of Megatron-Core -> its parts, as transformers names them
_PARTS = {
    "self_attention.linear_qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attention.linear_proj": ("self_attn.o_proj",),
    "mlp.linear_fc1": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.linear_fc2": ("mlp.down_proj",),
}
# between A and B, by whether the layer is column-parallel and whether rows are split (sequence parallelism)
_COMMUNICATE: dict[tuple[bool, bool], Callable[[Tensor], Tensor]] = {
    (True, False): copy_to_tensor_model_parallel_region,
    (True, True): gather_from_sequence_parallel_region,
    (False, False): reduce_from_tensor_model_parallel_region,
    (False, True): reduce_scatter_to_sequence_parallel_region,
}


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
        self.scale = adapter.scale
        self.a = nn.Parameter(like.new_zeros(adapter.rank, in_size))
        self.b = nn.Parameter(like.new_zeros(out_size, adapter.rank))

    def forward(self, rows: Tensor, communicate: Callable[[Tensor], Tensor]) -> Tensor:
        return F.linear(communicate(F.linear(rows, self.a)), self.b) * self.scale


class _LinearAdapters(nn.Module):
    """Adapters of the parts of a linear layer, by index; parts without one add zeros."""

    def __init__(
        self,
        parts: Mapping[int, _AdapterPart],
        sizes: Sequence[int],  # local outputs of each part
        num_groups: int,  # blocks of the output, each with rows of every part
        communicate: Callable[[Tensor], Tensor],
    ):
        super().__init__()
        self.parts = nn.ModuleDict({str(index): part for index, part in parts.items()})
        self._sizes, self._num_groups, self._communicate = sizes, num_groups, communicate

    def forward(self, rows: Tensor) -> Tensor:
        added = {int(index): part(rows, self._communicate) for index, part in self.parts.items()}
        like = next(iter(added.values()))
        blocks = [
            added[index] if index in added else like.new_zeros(*like.shape[:-1], size)
            for index, size in enumerate(self._sizes)
        ]
        grouped = [block.unflatten(-1, (self._num_groups, -1)) for block in blocks]
        return torch.cat(grouped, dim=-1).flatten(-2)


class Adapters:
    """The adapters of this process's model chunks; attaching them freezes all other parameters."""

    def __init__(self, chunks: Sequence[MegatronPairModel], adapters: Mapping[str, Adapter]):
        self._is_enabled = True
        # what the parameters of the adapters hold of PEFT's
        self.pieces: dict[nn.Parameter, PiecesOf] = {}
        for chunk in chunks:
            chunk.requires_grad_(False)
            for index, layer in enumerate(chunk.decoder.layers):
                prefix, modules = f"model.layers.{chunk.weight_map.first_layer + index}.", dict(layer.named_modules())
                for target, parts in _PARTS.items():
                    found = [adapters.get(prefix + part) for part in parts]
                    if any(found) and target in modules:  # experts have no such layer
                        self._attach(chunk, modules[target], found)
            if chunk.pre_process:
                # the re-entrant checkpoint of Megatron-Core gives no gradient to layers whose input needs none
                chunk.embedding.register_forward_hook(_require_grad)

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Compute the base model within a `with` block."""
        self._is_enabled = False
        try:
            yield
        finally:
            self._is_enabled = True

    def _attach(self, chunk: MegatronPairModel, linear: Any, adapters: Sequence[Adapter | None]) -> None:
        weight_map, sequence_parallel = chunk.weight_map, chunk.config.sequence_parallel
        out_size, in_size = linear.weight.shape
        is_column = isinstance(linear, ColumnParallelLinear)
        sharded, dim = ("B", 0) if is_column else ("A", 1)
        sizes, num_groups = [out_size], 1
        if is_column:
            sizes, num_groups = _part_sizes(weight_map.shape, len(adapters), weight_map.tp_size)
        parts = {}
        for index, (adapter, size) in enumerate(zip(adapters, sizes, strict=True)):
            if adapter is None:
                continue
            part = parts[index] = _AdapterPart(adapter, in_size, size, linear.weight)
            for letter, matrix in (("A", part.a), ("B", part.b)):
                hf_name = f"base_model.model.{adapter.name}.lora_{letter}.default.weight"
                if letter == sharded:
                    set_tensor_model_parallel_attributes(matrix, True, dim, 1)
                    self.pieces[matrix] = partial(weight_map.over_tp, hf_name, dim)
                else:
                    matrix.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]
                    self.pieces[matrix] = partial(whole, hf_name)
        module = _LinearAdapters(parts, sizes, num_groups, _COMMUNICATE[is_column, sequence_parallel])
        linear.add_module("lora", module)

        def add(_: nn.Module, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
            out, bias = outputs
            return (out + module(inputs[0]) if self._is_enabled else out), bias

        linear.register_forward_hook(add)


def check_adapters(adapters: Mapping[str, Adapter], chunks: Sequence[MegatronPairModel]) -> None:
    """Reject adapters of layers that Megatron-Core has no place for."""
    known = {name for parts in _PARTS.values() for name in parts}
    others = [name for name in adapters if ".".join(name.split(".")[-2:]) not in known]
    if others:
        raise UserError(
            f"lora_target matches {others[0]}, which cannot have an adapter under megatron_train; use q_proj, k_proj, "
            "v_proj, o_proj, gate_proj, up_proj or down_proj"
        )
    check_adapted_heads(chunks[0].weight_map.shape, chunks[0].weight_map.tp_size)


def _part_sizes(shape: ModelShape, num_parts: int, tp_size: int) -> tuple[list[int], int]:
    """Local outputs of the parts of a column-parallel layer, and the number of blocks in which they alternate."""
    if num_parts == len(_PARTS["mlp.linear_fc1"]):
        return [shape.ffn_size // tp_size] * num_parts, 1
    groups = shape.num_kv_heads // tp_size
    head_rows = groups * shape.head_dim
    return [shape.heads_per_group * head_rows, head_rows, head_rows], groups


def _require_grad(_: nn.Module, __: Any, hidden: Tensor) -> Tensor:
    return hidden.requires_grad_() if torch.is_grad_enabled() else hidden
