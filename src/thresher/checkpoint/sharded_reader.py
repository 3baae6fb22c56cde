"""Tensors of a checkpoint, whole or in parts, in one file or many: any part of any of them, read when it is asked for.

A process reads what it needs and no more, however many processes wrote the files, and needs no group to do so.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from thresher.checkpoint.json_io import reading
from thresher.checkpoint.safetensors_io import HEADER_KEY
from thresher.checkpoint.sharded import ShardFile
from thresher.errors import CheckpointError

Shape = tuple[int, ...]
Slices = tuple[slice, ...]


@dataclass
class _Whole:
    """A tensor and its pieces: where each begins, how large it is, and the file that has it."""

    shape: Shape
    dtype: torch.dtype
    pieces: dict[Shape, tuple[Shape, str]]


class ShardedReader(contextlib.AbstractContextManager["ShardedReader"]):
    """The tensors under one stem; `tied` names those that share another's memory."""

    def __init__(self, directory: Path, stem: str):
        self._directory = directory
        self._files: dict[str, Any] = {}
        self._wholes: dict[str, _Whole] = {}
        self.tied: dict[str, str] = {}
        for file in _file_names(directory, stem):
            with self._readable_errors(file):
                self._add(file)
        for name, whole in self._wholes.items():
            if sum(prod(shape) for shape, _ in whole.pieces.values()) != prod(whole.shape):
                raise CheckpointError(f"{directory} lacks parts of {name}; resume from another checkpoint")

    def __exit__(self, *_: object) -> None:
        self._files.clear()

    def __iter__(self) -> Iterator[str]:
        return iter(self._wholes)

    def kinds(self) -> dict[str, tuple[Shape, torch.dtype]]:
        """Shape and dtype of every tensor."""
        every = {name: (whole.shape, whole.dtype) for name, whole in self._wholes.items()}
        return every | {name: every[first] for name, first in self.tied.items()}

    def shape(self, name: str) -> Shape:
        return self._wholes[self.tied.get(name, name)].shape

    def read(self, name: str, box: Slices | None = None) -> Tensor:
        """Read a tensor, or the part of it that lies in a box, from the files that have some of it."""
        name = self.tied.get(name, name)
        whole = self._wholes[name]
        box = tuple(slice(0, size) for size in whole.shape) if box is None else box
        size = tuple(side.stop - side.start for side in box)
        result: Tensor | None = None
        for offset, (shape, file) in whole.pieces.items():
            common = [
                slice(max(side.start, first), min(side.stop, first + length))
                for side, first, length in zip(box, offset, shape, strict=True)
            ]
            if 0 not in shape and any(side.start >= side.stop for side in common):
                continue
            with self._readable_errors(file):
                piece = self._read_piece(file, name, shape, _relative(common, offset))
            if tuple(piece.shape) == size:
                return piece
            result = torch.empty(size, dtype=whole.dtype) if result is None else result
            result[_relative(common, [side.start for side in box])] = piece
        return torch.empty(size, dtype=whole.dtype) if result is None else result

    def _read_piece(self, file: str, name: str, shape: Shape, box: Slices) -> Tensor:
        opened = self._files[file]
        if all(side == slice(0, size) for side, size in zip(box, shape, strict=True)):
            piece: Tensor = opened.get_tensor(name)
            return piece
        part: Tensor = opened.get_slice(name)[box]
        return part

    def _add(self, file: str) -> None:
        # Read, not mapped: the tensors outlive the checkpoint, which retention may delete.
        opened: Any = safe_open(self._directory / file, framework="pt", backend="pread")
        self._files[file] = opened
        header = json.loads((opened.metadata() or {}).get(HEADER_KEY, "{}"))
        self.tied |= header.get("tied", {})
        parts = header.get("parts", {})
        for name in opened.keys():  # noqa: SIM118
            shape = tuple(opened.get_slice(name).get_shape())
            whole_shape, offset = map(tuple, parts.get(name, (shape, (0,) * len(shape))))
            empty = opened.get_slice(name)[:0] if shape and prod(shape) else opened.get_tensor(name)
            whole = self._wholes.setdefault(name, _Whole(whole_shape, empty.dtype, {}))
            inside = all(0 <= at <= at + own <= side for at, own, side in zip(offset, shape, whole_shape, strict=True))
            if (whole.shape, whole.dtype) != (whole_shape, empty.dtype) or not inside:
                raise CheckpointError(
                    f"{self._directory / file} has a part of {name} that fits no other; resume from another checkpoint"
                )
            whole.pieces[offset] = (shape, file)  # what two processes share may be in both files

    def _readable_errors(self, file: str) -> contextlib.AbstractContextManager[None]:
        faults = (SafetensorError, ValueError, TypeError, AttributeError)
        return reading(self._directory / file, "a readable safetensors file", *faults)


class LocalShards(Mapping[str, Tensor]):
    """What one process needs of stored tensors, as a mapping that reads when it is asked."""

    def __init__(self, stored: ShardedReader, box_of: Callable[[str, Shape], Slices]):
        self._stored = stored
        self._box_of = box_of

    def __getitem__(self, name: str) -> Tensor:
        return self._stored.read(name, self._box_of(name, self._stored.shape(name)))

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(list(self._stored))


def load_tensors(directory: Path, stem: str) -> dict[str, Tensor]:
    """Read everything under a stem, whole."""
    with ShardedReader(directory, stem) as stored:
        tensors = {name: stored.read(name) for name in stored}
        return tensors | {name: tensors[first] for name, first in stored.tied.items()}


def _file_names(directory: Path, stem: str) -> list[str]:
    pattern = re.compile(rf"{re.escape(stem)}-(\d{{5,}})-of-(\d{{5,}})\.safetensors")
    counts = {int(match[2]) for path in directory.glob(f"{stem}-*") if (match := pattern.fullmatch(path.name))}
    # the files of two saves never meet in one checkpoint; the largest number names what is missing, if anything is
    count = max(counts, default=1)
    return [ShardFile(index, count).name(stem) for index in range(count)]


def _relative(box: list[slice], origin: Any) -> Slices:
    return tuple(slice(side.start - first, side.stop - first) for side, first in zip(box, origin, strict=True))
