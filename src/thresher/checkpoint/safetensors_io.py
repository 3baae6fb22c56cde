"""Dictionaries of tensors, or of parts of them, into safetensors files; `stored` reads them.

Decides what happens to tensors that safetensors itself refuses: names for the very same memory (tied weights)
are written once and come back tied; views that only overlap are written as separate copies; other strides are
made contiguous. A file's header says where its parts lie in their wholes. Nothing is ever unpickled.
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
from thresher.checkpoint.sharded import ShardFile, TensorShard

# One header key only: safetensors writes several in random order, and equal states must give equal bytes.
HEADER_KEY = "thresher"


def save_tensors(directory: Path, stem: str, tensors: Mapping[str, Tensor]) -> str:
    """Write tensors to `<stem>.safetensors`; return the name of the file."""
    first_names, tied = _find_tied(tensors)
    name = ShardFile().name(stem)
    _write(directory / name, first_names, {"tied": tied} if tied else {})
    return name


def save_parts(directory: Path, stem: str, parts: Mapping[str, TensorShard], number: ShardFile) -> str:
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
    durable.sync_file(path)


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
