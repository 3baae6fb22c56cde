"""Dictionaries of tensors, or of parts of them, into safetensors files; `stored` reads them.

Decides what happens to tensors that safetensors itself refuses: names for the very same memory (tied weights)
are written once and come back tied; views that only overlap are written as separate copies; other strides are
made contiguous. A file's header says where its parts lie in their wholes. Nothing is ever unpickled.
"""

import errno
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from thresher.checkpoint.exact_json import save_json
from thresher.checkpoint.parts import FileNumber, Part

# One header key only: safetensors writes several in random order, and equal states must give equal bytes.
HEADER_KEY = "thresher"


def save_tensors(
    directory: Path, stem: str, tensors: Mapping[str, Tensor], *, max_shard_bytes: int | None = None
) -> list[str]:
    """Write tensors to `<stem>.safetensors`, or to numbered shards and an index if they exceed the limit.

    A tensor is never split, so one larger than the limit gets a shard of its own. Returns the names of the
    files.
    """
    first_names, tied = _find_tied(tensors)
    shards = _split(first_names, max_shard_bytes)
    names = [FileNumber(index, len(shards)).name(stem) for index in range(len(shards))]
    for name, shard in zip(names, shards, strict=True):
        own_ties = {name: first for name, first in tied.items() if first in shard}
        _write(directory / name, shard, {"tied": own_ties} if own_ties else {})
    if len(shards) == 1:
        return names
    file_of = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
    # The same index that transformers and the hub use.
    num_bytes = sum(tensor.nbytes for tensor in first_names.values())
    index = f"{stem}.safetensors.index.json"
    save_json(directory / index, {"metadata": {"total_size": num_bytes}, "weight_map": file_of})
    return [*names, index]


def save_parts(directory: Path, stem: str, parts: Mapping[str, Part], number: FileNumber) -> str:
    """Write one process's parts into its file; return the name."""
    split = {name: [list(part.shape), list(part.offset)] for name, part in parts.items() if not part.is_whole}
    values = {name: part.values for name, part in parts.items()}
    _write(directory / number.name(stem), values, {"parts": split} if split else {})
    return number.name(stem)


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


def _write(path: Path, tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> None:
    metadata = {HEADER_KEY: json.dumps(header, sort_keys=True)} if header else None
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
