"""Flat dictionaries of tensors in safetensors files.

Decides what happens to tensors that safetensors itself refuses: names for the very same memory (tied weights)
are written once and come back tied; views that only overlap are written as separate copies; other strides are
made contiguous. Nothing is ever unpickled.
"""

import errno
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from thresher.checkpoint.exact_json import load_json, save_json
from thresher.errors import CheckpointError

# One header key only: safetensors writes several in random order, and equal states must give equal bytes.
_HEADER_KEY = "thresher.tied"


def save_tensors(
    directory: Path, stem: str, tensors: Mapping[str, Tensor], *, max_shard_bytes: int | None = None
) -> list[str]:
    """Write tensors to `<stem>.safetensors`, or to numbered shards and an index if they exceed the limit.

    A tensor is never split, so one larger than the limit gets a shard of its own. Returns the names of the
    files.
    """
    first_names, tied = _find_tied(tensors)
    shards = _split(first_names, max_shard_bytes)
    if len(shards) == 1:
        _write(directory / f"{stem}.safetensors", shards[0], tied)
        return [f"{stem}.safetensors"]
    names = [f"{stem}-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    for name, shard in zip(names, shards, strict=True):
        _write(directory / name, shard, tied)
    file_of = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
    # The same index that transformers and the hub use.
    num_bytes = sum(tensor.nbytes for tensor in first_names.values())
    save_json(directory / _index_name(stem), {"metadata": {"total_size": num_bytes}, "weight_map": file_of})
    return [*names, _index_name(stem)]


def load_tensors(directory: Path, stem: str, *, device: str | torch.device = "cpu") -> dict[str, Tensor]:
    """Read what `save_tensors` wrote under this stem."""
    if (directory / _index_name(stem)).exists():
        names = sorted(set(load_json(directory / _index_name(stem))["weight_map"].values()))
    else:
        names = [f"{stem}.safetensors"]
    tensors: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    for name in names:
        path = directory / name
        try:
            # Read, not mapped: the tensors outlive the checkpoint, which retention may delete.
            with safe_open(path, framework="pt", device=str(device), backend="pread") as file:
                tied |= json.loads((file.metadata() or {}).get(_HEADER_KEY, "{}"))
                tensors |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        except FileNotFoundError as error:
            raise CheckpointError(f"{path} is missing; resume from another checkpoint") from error
        except SafetensorError as error:
            raise CheckpointError(
                f"{path} is not a readable safetensors file ({error}); resume from another checkpoint"
            ) from error
    return tensors | {name: tensors[first] for name, first in tied.items()}


def _find_tied(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    first_names: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    name_of_memory: dict[tuple[object, ...], str] = {}
    for name, tensor in sorted(tensors.items()):
        # Empty tensors all lie at address 0 and share nothing.
        memory = (
            (tensor.device, tensor.dtype, tensor.data_ptr(), tensor.shape, tensor.stride())
            if tensor.numel()
            else (name,)
        )
        first = name_of_memory.setdefault(memory, name)
        if first == name:
            first_names[name] = tensor
        else:
            tied[name] = first
    return first_names, tied


def _split(tensors: Mapping[str, Tensor], max_shard_bytes: int | None) -> list[dict[str, Tensor]]:
    if max_shard_bytes is not None and max_shard_bytes < 1:
        raise ValueError(f"a shard must hold at least one byte, got {max_shard_bytes}")
    shards: list[dict[str, Tensor]] = [{}]
    num_bytes = 0
    for name, tensor in tensors.items():
        if shards[-1] and max_shard_bytes is not None and num_bytes + tensor.nbytes > max_shard_bytes:
            shards.append({})
            num_bytes = 0
        shards[-1][name] = tensor
        num_bytes += tensor.nbytes
    return shards


def _write(path: Path, tensors: Mapping[str, Tensor], tied: Mapping[str, str]) -> None:
    header = {name: first for name, first in tied.items() if first in tensors}
    metadata = {_HEADER_KEY: json.dumps(header, sort_keys=True)} if header else None
    path.touch()
    mode = path.stat().st_mode
    try:
        save_file(_own_memory(tensors), path, metadata=metadata)
    except SafetensorError as error:
        # It hides the system's error in its text; the caller knows what to say about an OSError.
        match = re.search(r"\(os error (\d+)\)", str(error))
        raise OSError(int(match[1]) if match else errno.EIO, str(error)) from error
    # safetensors writes files that only their owner may read; use the mode that the user's umask gives.
    path.chmod(mode)
    # Flushed by the rank that wrote it: on a network file system nobody else can.
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _own_memory(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Give every tensor contiguous CPU memory that it shares with no other."""
    plain: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        dense = tensor.detach().cpu().contiguous()
        storage = dense.untyped_storage()
        if storage.nbytes() != dense.nbytes or storage.data_ptr() in seen:
            dense = dense.clone()
        seen.add(dense.untyped_storage().data_ptr())
        plain[name] = dense
    return plain


def _index_name(stem: str) -> str:
    return f"{stem}.safetensors.index.json"
