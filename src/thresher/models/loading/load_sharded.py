"""Load a sharded model from safetensors: no process ever holds the full model.

The model is built on the meta device, its parameters are sharded, and each process then reads its shards. Processes
that hold the same shards divide the tensors: each reads a part and sends it to the others.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from accelerate import init_empty_weights
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import GenerationConfig, PreTrainedModel

from thresher.distributed.groups import SINGLE_PROCESS, Group
from thresher.distributed.run_on_all import divide_by_size, run_on_all
from thresher.distributed.tensors import local_slices, to_local
from thresher.errors import UserError
from thresher.models.loading.convert_tensors import check_conversion, convert_shards
from thresher.models.loading.load import (
    REWARD_HEAD,
    class_to_load,
    load_model,
    load_model_config,
    translate_load_errors,
    with_soft_caps,
    without_dropout,
)
from thresher.models.loading.location import hub_arguments
from thresher.models.loading.quantization import (
    Quantization,
    QuantizedLinear,
    dequantize_modules,
    quantize_modules,
    quantized_modules,
    stored_quantization,
)
from thresher.models.loading.weight_files import (
    check_shardable,
    differently_tied,
    find_file,
    find_weight_files,
    has_plain_tensors,
    is_of_adapter,
    missing_tensor,
    name_in_files,
    open_safetensors,
    wrong_shape,
)
from thresher.models.pipeline_chunk import head_of

# rows of tied matrices to compare: a few hundred MB at most
_ROWS_AT_ONCE = 4096
# elements; no buffer has as many
_LARGE = 1 << 24


def build_on_meta(
    path: str,
    *,
    dtype: torch.dtype,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    is_reward_model: bool = False,
    quantization: Quantization | None = None,
) -> PreTrainedModel:
    """Build a model on the meta device to read its shards; reject one that cannot be sharded."""
    check_shardable(path)
    model = build_without_weights(
        path,
        dtype=dtype,
        attn_implementation=attn_implementation,
        trust_remote_code=trust_remote_code,
        is_reward_model=is_reward_model,
        quantization=quantization,
    )
    if quantized_modules(model) and not stores_every_parameter(model, path):
        raise cannot_quantize(path)
    return model


def build_to_share(
    path: str,
    *,
    dtype: torch.dtype,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    is_reward_model: bool = False,
    quantization: Quantization | None = None,
) -> PreTrainedModel | None:
    """Build a model on the meta device whose replicas can read it together; None if transformers must load it."""
    config = load_model_config(path, trust_remote_code=trust_remote_code)
    runs_code = trust_remote_code and bool(getattr(config, "auto_map", None))
    if runs_code or not has_plain_tensors(path):
        return None
    model = build_without_weights(
        path,
        dtype=dtype,
        attn_implementation=attn_implementation,
        trust_remote_code=trust_remote_code,
        is_reward_model=is_reward_model,
        quantization=quantization,
    )
    # transformers loads some modules in a different precision
    in_fp32 = model._keep_in_fp32_modules or model._keep_in_fp32_modules_strict
    has_one_dtype = dtype == torch.float32 or not in_fp32
    return model if has_one_dtype and stores_every_parameter(model, path) else None


def cannot_quantize(path: str) -> UserError:
    return UserError(
        f"{path} cannot be quantized while it is read: quantization needs a model of transformers in safetensors files "
        "that have each tensor under its name, in master_dtype fp32 if the model keeps some modules in fp32; save the "
        "model with save_pretrained, or remove model_args.quantization"
    )


def build_without_weights(
    path: str,
    *,
    dtype: torch.dtype,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    is_reward_model: bool = False,
    quantization: Quantization | None = None,
) -> PreTrainedModel:
    """Build a model whose parameters are on the meta device; buffers are real, but for those of quantized modules."""
    config = load_model_config(path, trust_remote_code=trust_remote_code)
    if (stored := stored_quantization(path)) is not None:
        if quantization is not None:
            raise UserError(f"{path} is stored in {stored}; remove model_args.quantization")
        del config.quantization_config  # an export is not quantized
    revision = hub_arguments(path)[1].get("revision")
    auto_class = class_to_load(config, is_reward_model=is_reward_model)
    runs_code = trust_remote_code and auto_class.__name__ in (getattr(config, "auto_map", None) or {})
    code = {"code_revision": revision} if runs_code and revision is not None else {}
    with translate_load_errors("model", path), init_empty_weights(include_buffers=False), _LargeOnMeta():
        model: PreTrainedModel = auto_class.from_config(
            config, dtype=dtype, attn_implementation=attn_implementation, trust_remote_code=trust_remote_code, **code
        )
    model.tie_weights()
    if stored is not None:
        names = SafetensorsReader(path, compares_tied=False).slices()
        quantize_modules(model, stored, path, set(names))
    elif quantization is not None:
        quantize_modules(model, quantization, path, None)
    return without_dropout(with_soft_caps(model, attn_implementation))


def load_dequantized(
    path: str,
    *,
    dtype: torch.dtype,
    quantization: Quantization | None,
    trust_remote_code: bool = False,
    is_reward_model: bool = False,
) -> PreTrainedModel:
    """Load a model with dense weights, equal to the ones that it computes with if it is quantized."""
    settings: dict[str, Any] = {"trust_remote_code": trust_remote_code, "is_reward_model": is_reward_model}
    if (quantization or stored_quantization(path)) is None:
        return load_model(path, dtype=dtype, **settings)
    model = build_to_share(path, dtype=dtype, quantization=quantization, **settings)
    if model is None:
        raise cannot_quantize(path)
    load_local_shards(model, path, torch.device("cpu"))
    dequantize_modules(model, dtype)
    if find_file(path, "generation_config.json") is not None:
        with translate_load_errors("generation config", path):
            model.generation_config = GenerationConfig.from_pretrained(path)
    return model


class _LargeOnMeta(TorchFunctionMode):
    """Makes large tensors on the meta device: a parameter has memory until its module registers it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.empty and kwargs.get("device") is None and _num_elements(args) > _LARGE:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def _num_elements(sizes: Any) -> int:
    return math.prod(sizes[0] if sizes and not isinstance(sizes[0], int) else sizes)


@torch.no_grad()
def copy_shard(source: Any, into: Tensor, path: str, name: str) -> None:
    """Copy this process's shard of a tensor from a slice of a safetensors file; path and name are for the error."""
    if tuple(source.get_shape()) != tuple(into.shape):
        raise wrong_shape(path, name, source.get_shape(), into.shape)
    local = to_local(into)
    if local.numel():
        local.copy_(source[local_slices(into)])


def allocate(model: PreTrainedModel, device: torch.device, *, weights_on: torch.device | None = None) -> None:
    """Give parameters on the meta device memory on `weights_on` or the device, and move buffers to the device."""
    home = weights_on or device
    model._apply(lambda tensor: torch.empty_like(tensor, device=home) if tensor.is_meta else tensor.to(device))
    if home != device:
        move_buffers(model, device)  # constants of quantized modules
    retie(model)  # allocating a tied parameter made two of it


def retie(model: PreTrainedModel) -> None:
    """Tie embedding and head again, and their trained copies if an adapter has them."""
    embedding: Any = model.get_input_embeddings()
    head = head_of(model)
    if not (hasattr(embedding, "original_module") and hasattr(head, "original_module")):
        model.tie_weights()
    elif model.all_tied_weights_keys:
        head.original_module.weight = embedding.original_module.weight
        head.modules_to_save["default"].weight = embedding.modules_to_save["default"].weight


def load_local_shards(
    model: PreTrainedModel,
    path: str,
    device: torch.device,
    *,
    weights_on: torch.device | None = None,
    replicas: Group = SINGLE_PROCESS,
    merged: Merged | None = None,
) -> None:
    """Allocate every parameter and fill its local shard; `init_adapters` sets adapters, `merged` ones are added.

    Each tensor is read by one of the `replicas`, which hold the same shards, unless transformers must convert it.
    """
    allocate(model, device, weights_on=weights_on)
    if not stores_every_parameter(model, path):
        slices = SafetensorsReader(path, model.all_tied_weights_keys, merged=merged).slices()
        run_on_all(replicas, lambda: convert_shards(model, slices, path, weights_on or device), "load the model")
        return

    def read() -> list[tuple[Tensor, int]]:
        tied = model.all_tied_weights_keys
        reader = SafetensorsReader(path, tied, compares_tied=replicas.rank == 0, merged=merged)
        named = [(name_in_files(name), each) for name, each in model.named_parameters() if not is_of_adapter(name)]
        stored = [*named, *_stored_buffers(model, reader)]
        readers = divide_by_size([to_local(tensor).numel() for _, tensor in stored], replicas.size)
        quantized, filled = quantized_modules(model), []
        for (name, tensor), rank in zip(stored, readers, strict=True):
            module = quantized.get(name)
            if _is_new_head(name, reader):
                nn.init.zeros_(to_local(tensor))
            elif module is not None:
                _check_stored(reader, name, module)
                if rank == replicas.rank:
                    module.fill(tensor, reader.slices(), name, path, device)
                filled += [(constant, rank) for constant in module.buffers()]
            elif rank == replicas.rank:
                reader.read(name, tensor)
            else:
                reader.find(name, tuple(tensor.shape))
            filled.append((tensor, rank))
        return filled

    if replicas.size == 1:
        read()
        return
    filled: list[tuple[Tensor, int]] = []
    # all read before any of them sends: they read at the same time, and an error is raised on all
    run_on_all(replicas, lambda: filled.extend(read()), "load the model")
    for tensor, rank in filled:
        _broadcast(to_local(tensor), rank, replicas, device)


@torch.no_grad()
def _broadcast(values: Tensor, source: int, group: Group, device: torch.device) -> None:
    """Copy the values of one rank to all, bit for bit, in the network of the device; in place where that is possible.

    Tensor by tensor: values that are elsewhere, or not contiguous, need the memory of one of them.
    """
    if not values.numel():
        return
    is_in_place = values.device == device and values.is_contiguous()
    sent = values if is_in_place else values.to(device).contiguous()
    # as bytes: not every backend knows every dtype
    dist.broadcast(sent.view(-1).view(torch.uint8), group=group.group, group_src=source)
    if not is_in_place:
        values.copy_(sent)


def stores_every_parameter(model: PreTrainedModel, path: str) -> bool:
    """Whether the files have each parameter as it is: experts may be stored one by one, and loaded as one tensor."""
    return _has_every_parameter(SafetensorsReader(path, model.all_tied_weights_keys, compares_tied=False), model)


def _has_every_parameter(reader: SafetensorsReader, model: PreTrainedModel) -> bool:
    names = [name_in_files(name) for name, _ in model.named_parameters() if not is_of_adapter(name)]
    return all(reader.has(name) or _is_new_head(name, reader) for name in names)


def check_tensors(model: PreTrainedModel, path: str) -> None:
    """Reject files without a parameter of a model on the meta device, or of another shape; reads no values."""
    reader = SafetensorsReader(path, model.all_tied_weights_keys, compares_tied=False)
    if not _has_every_parameter(reader, model):
        check_conversion(model, reader.slices(), path)
        return
    quantized = quantized_modules(model)
    for name, parameter in [*model.named_parameters(), *_stored_buffers(model, reader)]:
        if name in quantized:
            _check_stored(reader, name, quantized[name])
        elif not _is_new_head(name, reader):
            reader.find(name, tuple(parameter.shape))


def _check_stored(reader: SafetensorsReader, name: str, module: QuantizedLinear) -> None:
    if (shape := module.shape_in_files) is not None:
        reader.find(name, shape)


def _is_new_head(name: str, reader: SafetensorsReader) -> bool:
    """Whether a reward model starts from a causal language model, which has no such head."""
    return name == REWARD_HEAD and not reader.has(name)


def load_modules(
    model: PreTrainedModel,
    path: str,
    device: torch.device,
    after_module: Callable[[nn.Module], None],
    merged: Merged | None = None,
) -> None:
    """Allocate and read whole parameters but adapters, module by module; `after_module` may free them again."""
    reader = SafetensorsReader(path, model.all_tied_weights_keys, merged=merged)
    # a tied parameter belongs to two modules, and is stored under the first of its names
    names = {parameter: name for name, parameter in model.named_parameters()}
    loaded: dict[nn.Parameter, nn.Parameter] = {}
    for module in reversed(list(model.modules())):  # children before their parents
        for name, empty in list(module.named_parameters(recurse=False)):
            if empty.is_meta and empty not in loaded:
                values, stored = torch.zeros_like(empty, device=device), name_in_files(names[empty])
                if not _is_new_head(stored, reader):
                    reader.read(stored, values)
                loaded[empty] = nn.Parameter(values, requires_grad=empty.requires_grad)
            if empty.is_meta:
                module.register_parameter(name, loaded[empty])
        if next(module.parameters(recurse=False), None) is not None:
            after_module(module)
    move_buffers(model, device)
    for name, buffer in _stored_buffers(model, reader):
        reader.read(name, buffer)


def move_buffers(model: nn.Module, device: torch.device) -> None:
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))


def _stored_buffers(model: PreTrainedModel, reader: SafetensorsReader) -> Iterator[tuple[str, Tensor]]:
    """Yield the persistent buffers, which belong to a model's weights; the others are computed."""
    optional = model._keys_to_ignore_on_load_missing or ()
    for prefix, module in model.named_modules():
        if is_of_adapter(f"{prefix}."):
            continue
        for local_name, buffer in module.named_buffers(recurse=False):
            name = name_in_files(f"{prefix}.{local_name}" if prefix else local_name)
            is_optional = not reader.has(name) and any(re.search(pattern, name) for pattern in optional)
            if local_name not in module._non_persistent_buffers_set and not is_optional:
                yield name, buffer


class Merged(Protocol):
    """Adapters that are merged into the tensors of these names as they are read."""

    @property
    def names(self) -> set[str]: ...

    def slices(self, name: str, stored: Any) -> Any: ...


class SafetensorsReader:
    """Reads tensor shards from a model's safetensors files; `tied` maps names to the ones that they equal."""

    def __init__(
        self,
        directory: str | Path,
        tied: Mapping[str, str] | None = None,
        *,
        compares_tied: bool = True,
        merged: Merged | None = None,
    ):
        self._directory, self._merged = str(directory), merged
        self._file_of: dict[str, Any] = {}
        self._stored_as: dict[str, str] = {}
        for file in map(open_safetensors, find_weight_files(self._directory)):
            self._file_of |= dict.fromkeys(file.keys(), file)
        for name, other in (tied or {}).items():
            if self.has(name) and self.has(other):
                if compares_tied:
                    self._check_equal(name, other)
            elif self.has(name):  # as transformers, which stores one of them
                self._file_of[other] = self._file_of[name]
                self._stored_as[other] = name
        if merged is not None and (unknown := merged.names - self._file_of.keys()):
            raise UserError(
                f"the files of {directory} have no tensor {min(unknown)} to merge an adapter of merge_adapters into; "
                "merge it with PEFT's merge_and_unload and save that model"
            )

    def has(self, name: str) -> bool:
        return name in self._file_of

    def slices(self) -> dict[str, Any]:
        """All tensors of the files, not read yet."""
        return {name: self._slices(name) for name in self._file_of}

    def read(self, name: str, into: Tensor) -> None:
        """Copy this process's shard of a tensor from its file."""
        copy_shard(self.find(name, tuple(into.shape)), into, self._directory, name)

    def read_slices(self, name: str, shape: tuple[int, ...], slices: tuple[slice, ...]) -> Tensor:
        """Read a slice of a tensor, which must have this shape in full."""
        values: Tensor = self.find(name, shape)[slices]
        return values

    def find(self, name: str, shape: tuple[int, ...]) -> Any:
        """Find a tensor of this name and shape; its values are not read yet."""
        if not self.has(name):
            raise missing_tensor(self._directory, name)
        stored = self._slices(name)
        if tuple(stored.get_shape()) != shape:
            raise wrong_shape(self._directory, name, stored.get_shape(), shape)
        return stored

    def _check_equal(self, name: str, other: str) -> None:
        one, two = self._slices(name), self._slices(other)
        rows = range(0, one.get_shape()[0], _ROWS_AT_ONCE)
        if one.get_shape() != two.get_shape() or not all(
            torch.equal(one[row : row + _ROWS_AT_ONCE], two[row : row + _ROWS_AT_ONCE]) for row in rows
        ):
            raise differently_tied(self._directory, name, other)

    def _slices(self, name: str) -> Any:
        stored = self._file_of[name].get_slice(self._stored_as.get(name, name))
        return stored if self._merged is None else self._merged.slices(name, stored)
