"""Write tensors, or shards of them, to safetensors files; `sharded_reader` reads them.

Decides what happens to tensors that safetensors rejects: names of the same memory (tied weights) are written once and
are tied again after loading; overlapping views are written as separate copies; other strides are made contiguous. The
header of a file stores the global shape of its shards, and their offset: of blocks under `parts`, of elements of the
flattened tensor under `flat`.
"""

import errno
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from thresher import durable
from thresher.checkpoint.sharded import FlatShard, Shard, ShardFile, TensorShard

# a single header key: safetensors writes several in random order, and equal states must give equal bytes
HEADER_KEY = "thresher"


def save_tensors(directory: Path, stem: str, tensors: Mapping[str, Tensor]) -> str:
    """Write tensors to `<stem>.safetensors`; return the file name."""
    first_names, tied = _find_tied(tensors)
    name = ShardFile().name(stem)
    _write(directory / name, first_names, {"tied": tied} if tied else {})
    return name


def save_shards(directory: Path, stem: str, shards: Mapping[str, Shard], file: ShardFile) -> str:
    """Write one process's shards into its file; return the file name."""
    partial = {name: shard for name, shard in shards.items() if not shard.is_full}
    blocks = {name: [list(s.shape), list(s.offset)] for name, s in partial.items() if isinstance(s, TensorShard)}
    ranges = {name: [list(s.shape), s.start] for name, s in partial.items() if isinstance(s, FlatShard)}
    header = {key: positions for key, positions in (("parts", blocks), ("flat", ranges)) if positions}
    values = {name: shard.values.view(shard.shape) if shard.is_full else shard.values for name, shard in shards.items()}
    _write(directory / file.name(stem), values, header)
    return file.name(stem)


def _find_tied(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    first_names: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    name_of_memory: dict[tuple[object, ...], str] = {}
    for name, tensor in sorted(tensors.items()):
        # all empty tensors have address 0 and share nothing
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


def _write(path: Path, tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> None:
    metadata = {HEADER_KEY: json.dumps(header, sort_keys=True)} if header else None
    path.touch()
    mode = path.stat().st_mode
    try:
        save_file(_unshared(tensors), path, metadata=metadata)
    except SafetensorError as error:
        # the OS error is only in its text; callers translate an OSError into advice
        match = re.search(r"\(os error (\d+)\)", str(error))
        raise OSError(int(match[1]) if match else errno.EIO, str(error)) from error
    # safetensors creates files that only their owner may read; use the mode of the user's umask
    path.chmod(mode)
    # on a network file system, only the rank that wrote a file can flush it
    durable.sync_file(path)


def _unshared(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors in contiguous CPU memory that no two of them share."""
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
