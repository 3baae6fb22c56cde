"""The parameters of a model as each process of a mesh holds them: stages, tensor-parallel shards, FSDP2 groups.

Read from the model on the meta device, so that every architecture and adapter is counted as it is built. The rules are
those of strategies/native: pipeline_parallel.py, tensor_parallel.py and fsdp.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any, Literal, NamedTuple

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.distributed.tensor_parallel import replace_layer_number_by_wildcard

from thresher.distributed.mesh import ParallelDims
from thresher.errors import UserError
from thresher.models.loading.trained import widest_dtype
from thresher.models.logps import base_model
from thresher.models.optimizations.llama_layers import is_llama_like
from thresher.models.pipeline_chunk import decoder_of
from thresher.models.router import num_experts
from thresher.strategies.native.pipeline_parallel import partition_layers
from thresher.strategies.native.tensor_parallel import module_styles, partial_gradient_modules


@dataclass(frozen=True)
class Parameter:
    """A parameter, or this process's tensor-parallel shard of it.

    layer: index of its decoder layer, None outside of them. style: of the tensor-parallel plan. is_narrow: stored in
    the compute precision.
    """

    name: str
    shape: tuple[int, ...]
    is_trained: bool
    layer: int | None
    style: str | None = None
    has_partial_gradient: bool = False
    is_narrow: bool = False

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def path(self) -> str:
        """Its name within the layer, such as self_attn.q_proj.weight."""
        return self.name if self.layer is None else self.name.partition(f"layers.{self.layer}.")[2]

    @cached_property
    def module(self) -> str:
        """Path of its module within the layer, such as self_attn.q_proj."""
        return self.path.rpartition(".")[0]

    def tp_shard(self, size: int) -> Parameter:
        """The shard of the first tensor-parallel rank, which is as large as any."""
        dim = _sharded_dim(self.style, len(self.shape), self.name)
        if size == 1 or dim is None:
            return self
        shape = list(self.shape)
        shape[dim] = -(-shape[dim] // size)
        return replace(self, shape=tuple(shape))

    def fsdp_numel(self, size: int) -> int:
        """Elements of a shard, padded: FSDP2 splits the first dimension into equal parts."""
        first, *rest = self.shape or (1,)
        return -(-first // size) * prod(rest)


def _sharded_dim(style: str | None, ndim: int, name: str) -> int | None:
    """The dimension that a style of transformers' plan shards; None: replicated."""
    if style is None:
        return None
    if style.startswith(("colwise", "packed_colwise")):
        return max(ndim - 2, 0)
    if style.startswith(("rowwise", "packed_rowwise")):
        return None if name.endswith(".bias") else ndim - 1
    return {"embedding_rowwise": 0, "embedding_colwise": 1}.get(style)


@dataclass(frozen=True)
class Layer:
    """The parameters of a decoder layer, or this process's tensor-parallel shards of them."""

    parameters: tuple[Parameter, ...]

    @cached_property
    def numel(self) -> int:
        """Elements of its matrices."""
        return sum(p.numel for p in self.parameters if len(p.shape) > 1)

    @cached_property
    def trained_numel(self) -> int:
        return sum(p.numel for p in self.parameters if p.is_trained and len(p.shape) > 1)

    @cached_property
    def narrow_numel(self) -> int:
        return sum(p.numel for p in self.parameters if p.is_narrow)

    @cached_property
    def trained_modules(self) -> frozenset[str]:
        """Paths of modules with trained matrices or adapters, and of the modules that contain them."""
        paths = [p.module.split(".") for p in self.parameters if p.is_trained and len(p.shape) > 1]
        return frozenset(".".join(path[:end]) for path in paths for end in range(1, len(path) + 1))

    @cached_property
    def adapted_modules(self) -> frozenset[str]:
        return frozenset(p.module.partition(".lora_")[0] for p in self.parameters if ".lora_A" in p.name)


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model that formulas need, beside its parameters.

    is_llama_like: the memory-efficient layers and the shorter last layer apply. experts, experts_per_token: 1 if dense.
    tied: the head is the embedding's matrix.
    """

    parameters: tuple[Parameter, ...]
    num_layers: int
    hidden: int
    vocab: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    experts: int
    experts_per_token: int
    is_llama_like: bool
    tied: bool
    embedding: str
    head: str

    @classmethod
    def of(cls, model: nn.Module) -> ModelShape:
        """Read the shape of a model on the meta device, with its adapters."""
        base = base_model(model)
        config = base.config.get_text_config()
        layers = getattr(decoder_of(base), "layers", None)
        if not layers:
            raise UserError(
                f"plan needs a decoder with a list of layers, and the model family {base.config.model_type} has none"
            )
        heads = int(config.num_attention_heads)
        experts = max(1, num_experts(config))
        embedding, head = (_weight(each) for each in (base.get_input_embeddings(), base.get_output_embeddings()))
        names = {parameter: name for name, parameter in base.named_parameters()}
        return cls(
            parameters=tuple(_parameters(base)),
            num_layers=len(layers),
            hidden=int(config.hidden_size),
            vocab=head.shape[0],
            heads=heads,
            kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
            head_dim=int(getattr(config, "head_dim", None) or config.hidden_size // heads),
            intermediate=_intermediate(config, experts),
            experts=experts,
            experts_per_token=int(getattr(config, "num_experts_per_tok", None) or 1) if experts > 1 else 1,
            is_llama_like=is_llama_like(layers[0]),
            tied=embedding is head,
            embedding=names[embedding],
            head=names[head],
        )

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel for parameter in self.parameters)

    @property
    def num_trained(self) -> int:
        return sum(parameter.numel for parameter in self.parameters if parameter.is_trained)

    @cached_property
    def by_layer(self) -> dict[int | None, tuple[Parameter, ...]]:
        """Parameters of each layer; those outside of layers under None."""
        found: dict[int | None, list[Parameter]] = {None: []}
        for parameter in self.parameters:
            found.setdefault(parameter.layer, []).append(parameter)
        return {layer: tuple(parameters) for layer, parameters in found.items()}

    def sharded(self, layer: int, tp: int) -> Layer:
        """Tensor-parallel shards of the parameters of a layer."""
        if (layer, tp) not in self._sharded:
            self._sharded[layer, tp] = Layer(tuple(p.tp_shard(tp) for p in self.by_layer[layer]))
        return self._sharded[layer, tp]

    @cached_property
    def _sharded(self) -> dict[tuple[int, int], Layer]:
        return {}

    @cached_property
    def kinds(self) -> list[int]:
        """A number per layer, equal for layers with the same modules, sizes and trained parameters."""
        known: dict[tuple[object, ...], int] = {}
        layers = (self.by_layer[layer] for layer in range(self.num_layers))
        signatures = (tuple(replace(p, name=p.path, layer=None) for p in layer) for layer in layers)
        return [known.setdefault(signature, len(known)) for signature in signatures]


def _weight(module: nn.Module) -> nn.Parameter:
    """The matrix of an embedding or a head; PEFT wraps one that has an adapter."""
    layer: Any = getattr(module, "base_layer", module)
    weight: nn.Parameter = layer.weight
    return weight


def _intermediate(config: PreTrainedConfig, experts: int) -> int:
    """Width of the MLP, or of one expert."""
    of_expert = getattr(config, "moe_intermediate_size", None) if experts > 1 else None
    return int(of_expert or getattr(config, "intermediate_size", None) or 4 * config.hidden_size)


def _parameters(model: PreTrainedModel) -> Iterable[Parameter]:
    styles: Mapping[str, str] = module_styles(model) if model.tp_plan else {}
    partial = partial_gradient_modules(model) if model.tp_plan else set()
    layer_of = {
        id(parameter): index for index, layer in enumerate(decoder_of(model).layers) for parameter in layer.parameters()
    }
    stored = widest_dtype(model)
    for name, parameter in model.named_parameters():
        generic, module = (replace_layer_number_by_wildcard(each) for each in (name, name.rpartition(".")[0]))
        yield Parameter(
            name,
            tuple(parameter.shape),
            parameter.requires_grad,
            layer_of.get(id(parameter)),
            styles.get(generic) or styles.get(module),
            has_partial_gradient=module in partial,
            is_narrow=parameter.dtype != stored,
        )


GroupKind = Literal["root", "embedding", "head", "tied", "layer"]


@dataclass(frozen=True)
class FsdpGroup:
    """Parameters that FSDP2 all-gathers together: those of layers in the compute precision.

    size: processes that share it. count: groups like this one, of layers of the same kind.
    """

    parameters: tuple[Parameter, ...]
    kind: GroupKind
    size: int
    count: int = 1

    @cached_property
    def numel(self) -> int:
        return sum(p.numel for p in self.parameters)

    @cached_property
    def trained_numel(self) -> int:
        return sum(p.numel for p in self.parameters if p.is_trained)

    @cached_property
    def shard_numel(self) -> int:
        return sum(p.fsdp_numel(self.size) for p in self.parameters)

    @cached_property
    def trained_shard_numel(self) -> int:
        return sum(p.fsdp_numel(self.size) for p in self.parameters if p.is_trained)


class HeldElements(NamedTuple):
    """Elements of the shards that a process holds. base: without adapters. narrow: stored in the compute precision."""

    weights: int
    trained: int
    trained_tensors: int
    base: int
    narrow: int


@dataclass(frozen=True)
class Stage:
    """The part of a model that one process of a mesh holds, before FSDP2 shards it.

    chunks: layers of each chunk of this stage, several with an interleaved schedule.
    """

    shape: ModelShape
    dims: ParallelDims
    index: int
    chunks: tuple[range, ...]

    @classmethod
    def of(cls, shape: ModelShape, dims: ParallelDims, index: int = 0, virtual_pp_size: int = 1) -> Stage:
        chunks = partition_layers(shape.num_layers, dims.pp * virtual_pp_size)[index :: dims.pp]
        return cls(shape, dims, index, tuple(chunks))

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.dims.pp - 1

    @cached_property
    def layers(self) -> list[int]:
        return [layer for chunk in self.chunks for layer in chunk]

    @property
    def has_last_layer(self) -> bool:
        return self.shape.num_layers - 1 in self.layers

    @cached_property
    def outer(self) -> tuple[Parameter, ...]:
        """Parameters outside of layers."""
        return tuple(p.tp_shard(self.dims.tp) for p in self.shape.by_layer[None] if self._holds(p))

    def _holds(self, parameter: Parameter) -> bool:
        """Whether a parameter outside of layers belongs to this stage."""
        if parameter.name == self.shape.embedding:
            return self.is_first or (self.is_last and self.shape.tied)
        return self.is_last or (not self._is_tail(parameter) and self.is_first)

    def layer(self, layer: int) -> Layer:
        return self.shape.sharded(layer, self.dims.tp)

    def in_layer(self, layer: int) -> tuple[Parameter, ...]:
        return self.layer(layer).parameters

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return (*self.outer, *(p for layer in self.layers for p in self.in_layer(layer)))

    @cached_property
    def layer_counts(self) -> list[tuple[int, int]]:
        """(a layer, how many layers of this stage cost the same). The last layer of a model may compute fewer rows."""
        counts: dict[tuple[int, bool, bool], list[int]] = {}
        for layer in self.layers:
            key = (self.shape.kinds[layer], self.trains_before(layer), layer == self.shape.num_layers - 1)
            counts.setdefault(key, [layer, 0])[1] += 1
        return [(layer, count) for layer, count in counts.values()]

    @cached_property
    def parameter_counts(self) -> list[tuple[Parameter, int]]:
        """Every parameter once per kind of layer, with the number of parameters like it."""
        in_layers = ((p, count) for layer, count in self.layer_counts for p in self.in_layer(layer))
        return [*((p, 1) for p in self.outer), *in_layers]

    @cached_property
    def held(self) -> HeldElements:
        counts = [(p, count, count * self.local_numel(p)) for p, count in self.parameter_counts]
        return HeldElements(
            sum(numel for *_, numel in counts),
            sum(numel for p, _, numel in counts if p.is_trained),
            sum(count for p, count, _ in counts if p.is_trained),
            sum(numel for p, _, numel in counts if ".lora_" not in p.name),
            sum(numel for p, _, numel in counts if p.is_narrow),
        )

    def trains_before(self, layer: int) -> bool:
        """Whether hidden states that enter a layer require a gradient: those of another stage always do."""
        return not self.is_first or self._first_trained < layer

    @cached_property
    def _first_trained(self) -> int:
        """The first layer with a trained parameter; -1 if the embedding is trained."""
        if any(p.is_trained and not self._is_tail(p) for p in self.outer):
            return -1
        trained = (layer for layer in self.layers if any(p.is_trained for p in self.shape.by_layer[layer]))
        return next(trained, self.shape.num_layers)

    def _is_tail(self, parameter: Parameter) -> bool:
        """Whether a parameter follows the last layer."""
        return parameter.layer is None and not parameter.name.startswith(self.shape.embedding.rpartition(".")[0])

    @cached_property
    def fsdp_groups(self) -> list[FsdpGroup]:
        """The groups of fsdp.py, layers of a kind once; empty without FSDP2."""
        size = self.dims.fsdp_size
        if size == 1:
            return []
        matrices = {layer: tuple(p for p in self.in_layer(layer) if len(p.shape) > 1) for layer, _ in self.layer_counts}
        layers = [FsdpGroup(matrices[layer], "layer", size, count) for layer, count in self.layer_counts]
        outer = [FsdpGroup((p,), kind, size) for p in self.outer if (kind := self._outer_kind(p)) is not None]
        alone = {p.name for group in outer for p in group.parameters}
        vectors = (p for layer in self.layers for p in self.in_layer(layer) if len(p.shape) <= 1)
        root = FsdpGroup((*(p for p in self.outer if p.name not in alone), *vectors), "root", size)
        return [group for group in (root, *outer, *layers) if group.parameters]

    def _outer_kind(self, parameter: Parameter) -> GroupKind | None:
        """The group of the embedding or the head; None: the root has the parameter."""
        shape = self.shape
        if shape.tied and parameter.name == shape.embedding and self.is_last:
            return "tied"
        # an adapter makes another module of an embedding or a head
        kinds: dict[str, GroupKind] = {shape.head: "head", shape.embedding: "embedding"}  # tied ones have one name
        return None if "base_layer" in parameter.name else kinds.get(parameter.name)

    def outer_numel(self, *kinds: GroupKind) -> int:
        """Elements outside of layers that FSDP2 gathers in groups of these kinds; 0 without FSDP2."""
        return sum(group.numel for group in self.fsdp_groups if group.kind in kinds)

    @property
    def trains_embedding(self) -> bool:
        return any(p.is_trained for p in self.outer if p.name == self.shape.embedding)

    def local_numel(self, parameter: Parameter) -> int:
        return parameter.numel if self.dims.fsdp_size == 1 else parameter.fsdp_numel(self.dims.fsdp_size)
