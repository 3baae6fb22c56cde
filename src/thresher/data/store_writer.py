"""Write a store: pairs in, a complete directory out, or nothing at all.

Bytes depend on the pairs and `shard_rows` only: record batches hold a fixed number of rows whatever pieces arrive.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from thresher.data.batch import Pair
from thresher.data.store import (
    FORMAT_VERSION,
    HASH_BYTES,
    LENGTH_DTYPE,
    ROWS_PER_RECORD_BATCH,
    SCHEMA,
    StoreFile,
)
from thresher.errors import UserError

_CONTENT_DTYPE = np.dtype([("hash", f"V{HASH_BYTES}"), ("weight", "<f4"), ("margin", "<f4")])


@dataclass(frozen=True)
class PairHashes:
    """Hashes of token ids and masks; `swapped` is the hash the pair would have with its sides exchanged."""

    pair: bytes
    swapped: bytes
    prompt: bytes


def hash_pair(pair: Pair) -> PairHashes:
    """Hash what a model sees of a pair: weight and margin are left out."""
    prompt = _hash(pair.prompt_ids.astype("<i4").tobytes())
    chosen = _hash_side(pair.chosen_ids, pair.chosen_mask)
    rejected = _hash_side(pair.rejected_ids, pair.rejected_mask)
    return PairHashes(_hash(prompt + chosen + rejected), _hash(prompt + rejected + chosen), prompt)


def _hash_side(ids: npt.NDArray[np.int32], mask: npt.NDArray[np.bool_] | None) -> bytes:
    ids_hash = _hash(ids.astype("<i4").tobytes())
    # a mask that scores everything means the same as none
    return ids_hash if mask is None or mask.all() else _hash(ids_hash + mask.astype(np.uint8).tobytes())


def _hash(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=HASH_BYTES).digest()


def pairs_to_record_batch(pairs: Sequence[Pair], hashes: Sequence[PairHashes]) -> Any:
    """Lay pairs out in the store's columns."""
    columns = [
        _list_array([pair.prompt_ids for pair in pairs], pa.int32()),
        _list_array([pair.chosen_ids for pair in pairs], pa.int32()),
        _list_array([pair.rejected_ids for pair in pairs], pa.int32()),
        _list_array([pair.chosen_mask for pair in pairs], pa.bool_()),
        _list_array([pair.rejected_mask for pair in pairs], pa.bool_()),
        pa.array([pair.weight for pair in pairs], pa.float32()),
        pa.array([pair.margin for pair in pairs], pa.float32()),
        pa.array([each.pair for each in hashes], pa.binary(HASH_BYTES)),
        pa.array([each.prompt for each in hashes], pa.binary(HASH_BYTES)),
    ]
    typed = [column.cast(field.type) for column, field in zip(columns, SCHEMA, strict=True)]
    return pa.RecordBatch.from_arrays(typed, schema=SCHEMA)


def _list_array(values: Sequence[npt.NDArray[Any] | None], item_type: Any) -> Any:
    lengths = np.asarray([0 if value is None else len(value) for value in values], dtype=np.int64)
    present = [value for value in values if value is not None]
    flat = np.concatenate(present) if present else np.zeros(0)
    return _to_lists(lengths, flat, np.asarray([value is not None for value in values], dtype=np.bool_), item_type)


def _to_lists(
    lengths: npt.NDArray[np.int64], flat: npt.NDArray[Any], is_valid: npt.NDArray[np.bool_], item_type: Any
) -> Any:
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())
    nulls = None if is_valid.all() else pa.array(~is_valid)
    return pa.ListArray.from_arrays(offsets, pa.array(flat, item_type), mask=nulls)


def _canonical(batch: Any) -> Any:
    """Copy a batch into buffers of its own: a slice would write bytes that tell how its pairs arrived."""
    columns = []
    for column in batch.columns:
        if pa.types.is_list(column.type):
            is_valid = column.is_valid().to_numpy(zero_copy_only=False)
            lengths = np.where(is_valid, np.diff(column.offsets.to_numpy()), 0)
            flat = column.flatten().to_numpy(zero_copy_only=False)
            columns.append(_to_lists(lengths, flat, is_valid, column.type.value_type).cast(column.type))
        else:
            columns.append(pa.Array.from_buffers(column.type, len(column), [None, pa.py_buffer(_value_bytes(column))]))
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


class StoreWriter:
    """Collect record batches into shards beside the output directory; `finish` renames the whole into place."""

    def __init__(self, output: Path, shard_rows: int) -> None:
        self._output = output
        self._shard_rows = shard_rows
        self._rows_per_batch = min(ROWS_PER_RECORD_BATCH, shard_rows)
        output.parent.mkdir(parents=True, exist_ok=True)
        self._directory = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
        (self._directory / "shards").mkdir()
        self._pending: list[Any] = []
        self._num_pending = 0
        self._shards: list[StoreFile] = []
        self._sink: Any = None
        self._writer: Any = None
        self._pairs_in_shard = 0
        self._lengths = (self._directory / "lengths.bin").open("wb")
        self._scored = (self._directory / "scored.bin").open("wb")
        self._has_masks = False
        self._columns_in_use: set[str] = set()
        self._longest = 0
        self._content = hashlib.sha256()

    def __enter__(self) -> StoreWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave nothing behind unless `finish` was reached."""
        self._close_shard(discard=True)
        self._lengths.close()
        self._scored.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def append(self, batch: Any) -> None:
        """Add pairs, as `pairs_to_record_batch` lays them out."""
        if batch.num_rows == 0:
            return
        self._pending.append(batch)
        self._num_pending += batch.num_rows
        while self._num_pending >= self._rows_wanted():
            self._write(self._take(self._rows_wanted()))

    def finish(self, fields: Mapping[str, Any], *, overwrite: bool = False) -> Path:
        """Write the manifest and let the store appear under its name."""
        if self._num_pending:
            self._write(self._take(self._num_pending))
        self._close_shard(discard=False)
        self._lengths.close()
        self._scored.close()
        if not self._has_masks:
            (self._directory / "scored.bin").unlink()
        names = ["lengths.bin", "scored.bin"] if self._has_masks else ["lengths.bin"]
        manifest = {
            "format_version": FORMAT_VERSION,
            "num_pairs": sum(shard.num_pairs for shard in self._shards),
            "content_digest": self._content.hexdigest(),
            "longest_pair": self._longest,
            "columns_in_use": sorted(self._columns_in_use),
            **fields,
            "indexes": [asdict(_describe(self._directory, name)) for name in names],
            "shards": [asdict(shard) for shard in self._shards],
        }
        with (self._directory / "manifest.json").open("w", encoding="utf-8") as stream:
            json.dump(manifest, stream, indent=1, ensure_ascii=False)
            stream.write("\n")
            stream.flush()
            os.fsync(stream.fileno())
        # mkdtemp makes it private; a store is as readable as any other output
        self._directory.chmod(0o777 & ~_umask())
        replace_directory(self._directory, self._output, overwrite=overwrite)
        return self._output

    def _rows_wanted(self) -> int:
        return min(self._rows_per_batch, self._shard_rows - self._pairs_in_shard)

    def _take(self, num_rows: int) -> Any:
        table = pa.Table.from_batches(self._pending, schema=SCHEMA)
        rest = table.slice(num_rows)
        self._pending = rest.to_batches()
        self._num_pending = rest.num_rows
        return _canonical(table.slice(0, num_rows).combine_chunks().to_batches()[0])

    def _write(self, batch: Any) -> None:
        if self._writer is None:
            self._sink = pa.OSFile(str(self._directory / self._shard_name()), "wb")
            self._writer = pa.ipc.new_file(self._sink, SCHEMA)
        self._writer.write_batch(batch)
        self._pairs_in_shard += batch.num_rows
        self._write_lengths(batch)
        # pair by pair, so that the digest does not tell where a batch ended
        rows = np.empty(batch.num_rows, dtype=_CONTENT_DTYPE)
        for name in _CONTENT_DTYPE.names or ():
            rows[name] = np.frombuffer(_value_bytes(batch.column(name)), dtype=_CONTENT_DTYPE[name])
        self._content.update(rows.tobytes())
        for name, neutral in (("weight", 1.0), ("margin", 0.0)):
            if (rows[name] != neutral).any():
                self._columns_in_use.add(name)
        if self._pairs_in_shard == self._shard_rows:
            self._close_shard(discard=False)

    def _write_lengths(self, batch: Any) -> None:
        lengths = np.stack([np.diff(batch.column(column).offsets.to_numpy()) for column in range(3)], axis=1)
        _write_array(self._lengths, lengths)
        self._longest = max(self._longest, int((lengths[:, 0] + lengths[:, 1:].max(axis=1)).max()))
        scored = lengths[:, 1:].copy()
        for side, column in enumerate((batch.column("chosen_mask"), batch.column("rejected_mask"))):
            if column.null_count == len(column):
                continue
            self._has_masks = True
            for row in np.flatnonzero(column.is_valid().to_numpy(zero_copy_only=False)):
                scored[row, side] = column[int(row)].values.true_count
        _write_array(self._scored, scored)

    def _shard_name(self) -> str:
        return f"shards/{len(self._shards):05d}.arrow"

    def _close_shard(self, *, discard: bool) -> None:
        if self._writer is None:
            return
        self._writer.close()
        self._sink.close()
        self._writer = None
        if not discard:
            self._shards.append(_describe(self._directory, self._shard_name(), self._pairs_in_shard))
        self._pairs_in_shard = 0


def _value_bytes(array: Any) -> bytes:
    width = array.type.bit_width // 8
    return memoryview(array.buffers()[1])[array.offset * width : (array.offset + len(array)) * width].tobytes()


def _write_array(stream: BinaryIO, array: npt.NDArray[Any]) -> None:
    stream.write(array.astype(LENGTH_DTYPE).tobytes())


def _describe(directory: Path, name: str, num_pairs: int = 0) -> StoreFile:
    with (directory / name).open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
        os.fsync(stream.fileno())
    return StoreFile(name, (directory / name).stat().st_size, digest, num_pairs)


def _umask() -> int:
    umask = os.umask(0)
    os.umask(umask)
    return umask


def check_output(output: Path, *, overwrite: bool) -> None:
    """Refuse an output directory that exists, unless it is a store that may be overwritten."""
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return
    if not overwrite:
        raise UserError(f"{output} exists already; name another directory, or pass --overwrite if it is an old store")
    if not (output / "manifest.json").is_file():
        raise UserError(f"{output} is no pair store and is not overwritten; name another directory")


def replace_directory(new: Path, output: Path, *, overwrite: bool) -> None:
    """Rename `new` to `output`; an old store there is set aside first, so that no half-written one is ever seen."""
    check_output(output, overwrite=overwrite)
    aside = None
    if output.exists():
        aside = Path(tempfile.mkdtemp(prefix=f".{output.name}.old.", dir=output.parent))
        output.rename(aside / "store")
    new.rename(output)
    if aside is not None:
        shutil.rmtree(aside, ignore_errors=True)
