"""The files of a store while it is written: shards, indexes, and the digest of their content.

Bytes depend on the pairs and `shard_rows` only: record batches hold a fixed number of rows whatever pieces arrive,
and wherever a process was killed and another went on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from thresher import durable
from thresher.data.pair_columns import canonical, lengths_of, value_bytes
from thresher.data.store import HASH_BYTES, LENGTH_DTYPE, ROWS_PER_RECORD_BATCH, SCHEMA, StoreFile

_CONTENT_DTYPE = np.dtype([("hash", f"V{HASH_BYTES}"), ("weight", "<f4"), ("margin", "<f4")])
# an Arrow file is a magic word, padded to 8 bytes, a stream, and a footer
_STREAM_START = 8


class StoreFiles:
    """Collect record batches into shards in a directory.

    state: what `sync` returned to a process that was killed; its pairs up to then are kept.
    """

    def __init__(self, directory: Path, shard_rows: int, state: Mapping[str, Any] | None = None) -> None:
        self._directory = directory
        self._shard_rows = shard_rows
        self._rows_per_batch = min(ROWS_PER_RECORD_BATCH, shard_rows)
        (directory / "shards").mkdir(exist_ok=True)
        self._pending: list[Any] = []
        self._num_pending = 0
        self._shards = [StoreFile(**shard) for shard in state["shards"]] if state else []
        self.pairs_written = sum(shard.num_pairs for shard in self._shards)
        self._sink: Any = None
        self._writer: Any = None
        self._batches_in_shard = 0
        self._pairs_in_shard = 0
        self._lengths = _open_at(directory / "lengths.bin", 3 * LENGTH_DTYPE.itemsize * self.pairs_written)
        self._scored = _open_at(directory / "scored.bin", 2 * LENGTH_DTYPE.itemsize * self.pairs_written)
        self._has_masks = bool(state and state["has_masks"])
        self._columns_in_use: set[str] = set(state["columns_in_use"] if state else ())
        self._longest = int(state["longest_pair"]) if state else 0
        self._content = hashlib.sha256()
        if state:
            self._resume(int(state["batches_in_shard"]))

    @property
    def num_pairs(self) -> int:
        """Pairs that were appended, written or not."""
        return self.pairs_written + self._num_pending

    def append(self, batch: Any) -> None:
        """Add pairs, as `pairs_to_record_batch` lays them out."""
        if batch.num_rows == 0:
            return
        self._pending.append(batch)
        self._num_pending += batch.num_rows
        while self._num_pending >= self._rows_wanted():
            self._write(self._take(self._rows_wanted()))

    def sync(self) -> dict[str, Any]:
        """Bring what is written to the disk; return what another process needs to go on after it."""
        for stream in (self._lengths, self._scored):
            durable.sync_stream(stream)
        if self._writer is not None:
            durable.sync_file(self._directory / self._shard_name())
        return {
            "shards": [asdict(shard) for shard in self._shards],
            "batches_in_shard": self._batches_in_shard,
            "has_masks": self._has_masks,
            "columns_in_use": sorted(self._columns_in_use),
            "longest_pair": self._longest,
        }

    def finish(self) -> dict[str, Any]:
        """Write what is pending and close all files; return what the manifest tells of them."""
        if self._num_pending:
            self._write(self._take(self._num_pending))
        if self._writer is not None:
            self._close_shard()
        self.close()
        if not self._has_masks:
            (self._directory / "scored.bin").unlink()
        names = ["lengths.bin", "scored.bin"] if self._has_masks else ["lengths.bin"]
        return {
            "num_pairs": self.pairs_written,
            "content_digest": self._content.hexdigest(),
            "longest_pair": self._longest,
            "columns_in_use": sorted(self._columns_in_use),
            "indexes": [asdict(_describe(self._directory, name)) for name in names],
            "shards": [asdict(shard) for shard in self._shards],
        }

    def close(self) -> None:
        """Let go of the files, finished or not."""
        if self._writer is not None:
            self._writer.close()
            self._sink.close()
            self._writer = None
        self._lengths.close()
        self._scored.close()

    def _rows_wanted(self) -> int:
        return min(self._rows_per_batch, self._shard_rows - self._pairs_in_shard)

    def _take(self, num_rows: int) -> Any:
        table = pa.Table.from_batches(self._pending, schema=SCHEMA)
        rest = table.slice(num_rows)
        self._pending = rest.to_batches()
        self._num_pending = rest.num_rows
        return canonical(table.slice(0, num_rows).combine_chunks().to_batches()[0])

    def _write(self, batch: Any) -> None:
        if self._writer is None:
            self._sink = pa.OSFile(str(self._directory / self._shard_name()), "wb")
            self._writer = pa.ipc.new_file(self._sink, SCHEMA)
        self._writer.write_batch(batch)
        self._batches_in_shard += 1
        self._pairs_in_shard += batch.num_rows
        self.pairs_written += batch.num_rows
        self._write_lengths(batch)
        rows = self._digest_content(batch)
        for name, neutral in (("weight", 1.0), ("margin", 0.0)):
            if (rows[name] != neutral).any():
                self._columns_in_use.add(name)
        if self._pairs_in_shard == self._shard_rows:
            self._close_shard()

    def _digest_content(self, batch: Any) -> npt.NDArray[Any]:
        # pair by pair, so that the digest does not tell where a batch ended
        rows = np.empty(batch.num_rows, dtype=_CONTENT_DTYPE)
        for name in _CONTENT_DTYPE.names or ():
            rows[name] = np.frombuffer(value_bytes(batch.column(name)), dtype=_CONTENT_DTYPE[name])
        self._content.update(rows.tobytes())
        return rows

    def _write_lengths(self, batch: Any) -> None:
        lengths = lengths_of(batch)
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

    def _close_shard(self) -> None:
        self._writer.close()
        self._sink.close()
        self._writer = None
        self._shards.append(_describe(self._directory, self._shard_name(), self._pairs_in_shard))
        self._batches_in_shard = 0
        self._pairs_in_shard = 0

    def _resume(self, num_batches: int) -> None:
        """Take finished shards as they are, and copy the first batches of the one that a crash left open."""
        for shard in self._shards:
            for batch in _content_columns(self._directory / shard.name):
                self._digest_content(batch)
        if num_batches == 0:
            return
        shard_path = self._directory / self._shard_name()
        # under a name of its own: a crash while it is copied must find it whole
        torn = shard_path.with_suffix(".torn")
        if not torn.exists():
            shard_path.rename(torn)
        with pa.OSFile(str(torn)) as stream:
            stream.seek(_STREAM_START)
            reader = pa.ipc.open_stream(stream)
            for _ in range(num_batches):
                self._write(canonical(reader.read_next_batch()))
        self.sync()
        torn.unlink()


def _open_at(path: Path, size: int) -> BinaryIO:
    """Open a file for writing after its first `size` bytes."""
    stream = path.open("ab")
    stream.truncate(size)
    return stream


def _content_columns(path: Path) -> Iterator[Any]:
    # named columns only, read and not mapped: mapped pages would count as memory of this process
    fields = [SCHEMA.get_field_index(name) for name in _CONTENT_DTYPE.names or ()]
    with pa.OSFile(str(path)) as stream:
        reader = pa.ipc.open_file(stream, options=pa.ipc.IpcReadOptions(included_fields=fields))
        for number in range(reader.num_record_batches):
            yield reader.get_batch(number)


def _write_array(stream: BinaryIO, array: npt.NDArray[Any]) -> None:
    stream.write(array.astype(LENGTH_DTYPE).tobytes())


def _describe(directory: Path, name: str, num_pairs: int = 0) -> StoreFile:
    with (directory / name).open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    durable.sync_file(directory / name)
    return StoreFile(name, (directory / name).stat().st_size, digest, num_pairs)
