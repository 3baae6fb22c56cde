"""Write a store: pairs in, a complete directory out, or nothing at all but what a later process can continue.

Bytes depend on the pairs and `shard_rows` only: record batches hold a fixed number of rows whatever pieces arrive,
and wherever a process was killed and another went on.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from thresher import durable
from thresher.data.store.arrow_schema import lengths_of, rebuild_buffers
from thresher.data.store.reader import (
    FORMAT_VERSION,
    HASH_DTYPE,
    LENGTH_DTYPE,
    ROWS_PER_RECORD_BATCH,
    SCHEMA,
    StoreFile,
    fixed_width_values,
    sha256_of_file,
)
from thresher.data.store.staging import Staging, open_at

# what a crash costs at most; noting it takes a few hundredths of a second
PAIRS_PER_CHECKPOINT = 32_768
_CONTENT_DTYPE = np.dtype([("hash", HASH_DTYPE), ("weight", "<f4"), ("margin", "<f4")])
_CONTENT_COLUMNS = _CONTENT_DTYPE.names or ()
# an Arrow file is a magic word, padded to 8 bytes, a stream, and a footer
_STREAM_START = 8


class StoreWriter:
    """Collect record batches into shards beside the output directory; `finish` renames the whole into place.

    fits: see `Staging`; the state of a caller that goes on from a crash is `resumed`.
    pairs_written: pairs in whole record batches, which `checkpoint` keeps; others are still pending.
    """

    def __init__(self, output: Path, shard_rows: int, fits: str | None = None) -> None:
        self._shard_rows = shard_rows
        self._rows_per_batch = min(ROWS_PER_RECORD_BATCH, shard_rows)
        self._staging = Staging(output, fits)
        self._content = self._staging.content
        try:
            self._begin(self._staging.state["files"] if self._staging.state else {})
        except (pa.ArrowInvalid, OSError):
            if self._staging.state is None:
                raise
            # a disk or a person has damaged what was staged; everything in it can be made again
            self._staging.clear()
            self._begin({})
        state = self._staging.state
        self.resumed: Mapping[str, Any] | None = state["caller"] if state else None
        self._pairs_per_checkpoint = min(shard_rows, PAIRS_PER_CHECKPOINT)
        self._pairs_saved = self.pairs_written

    def _begin(self, state: Mapping[str, Any]) -> None:
        """Open the files; state is what `_sync` returned to a process that was killed, whose pairs are kept."""
        (self._content / "shards").mkdir(exist_ok=True)
        self._pending: list[Any] = []
        self._num_pending = 0
        self._shards = [StoreFile(**shard) for shard in state.get("shards", ())]
        self.pairs_written = sum(shard.num_pairs for shard in self._shards)
        self._sink: Any = None
        self._writer: Any = None
        self._batches_in_shard = 0
        self._pairs_in_shard = 0
        self._lengths = open_at(self._content / "lengths.bin", 3 * LENGTH_DTYPE.itemsize * self.pairs_written)
        self._scored = open_at(self._content / "scored.bin", 2 * LENGTH_DTYPE.itemsize * self.pairs_written)
        self._has_masks = bool(state.get("has_masks"))
        self._columns_in_use: set[str] = set(state.get("columns_in_use", ()))
        self._longest = int(state.get("longest_pair", 0))
        self._digest = hashlib.sha256()
        for shard in self._shards:
            for batch in _content_columns(self._content / shard.name):
                self._digest_content(batch)
        if num_batches := int(state.get("batches_in_shard", 0)):
            self._copy_torn_shard(num_batches)

    def _copy_torn_shard(self, num_batches: int) -> None:
        """Copy the first record batches of the shard that a crash left open."""
        # under a name of its own: a crash while it is copied must find it whole
        torn = self._shard_path.with_suffix(".torn")
        if not torn.exists():
            self._shard_path.rename(torn)
        with pa.OSFile(str(torn)) as stream:
            stream.seek(_STREAM_START)
            reader = pa.ipc.open_stream(stream)
            for _ in range(num_batches):
                self._write(rebuild_buffers(reader.read_next_batch()))
        self._sync()
        torn.unlink()

    def __enter__(self) -> StoreWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close_files()
        self._staging.close(failed=kind is not None)

    @property
    def directory(self) -> Path:
        """Where a caller keeps files of its own until the store is finished."""
        return self._staging.directory

    @property
    def num_pairs(self) -> int:
        """Pairs that were appended, written or not."""
        return self.pairs_written + self._num_pending

    @property
    def checkpoint_due(self) -> bool:
        return self.pairs_written - self._pairs_saved >= self._pairs_per_checkpoint

    def append(self, batch: Any) -> None:
        """Add pairs, as `pairs_to_record_batch` lays them out."""
        if batch.num_rows == 0:
            return
        self._pending.append(batch)
        self._num_pending += batch.num_rows
        while self._num_pending >= (wanted := min(self._rows_per_batch, self._shard_rows - self._pairs_in_shard)):
            self._write_pending(wanted)

    def checkpoint(self, caller: Mapping[str, Any]) -> None:
        """Let a later process go on from here, with `caller` as its `resumed`."""
        self._staging.save({"files": self._sync(), "caller": caller})
        self._pairs_saved = self.pairs_written

    def discard(self) -> None:
        """Keep nothing for a later process, which would come to the same end."""
        self._staging.discard()

    def finish(self, fields: Mapping[str, Any], *, overwrite: bool = False) -> Path:
        """Write what is pending and the manifest, and let the store appear under its name."""
        if self._num_pending:
            self._write_pending(self._num_pending)
        if self._writer is not None:
            self._close_shard()
        self._close_files()
        if not self._has_masks:
            (self._content / "scored.bin").unlink()
        names = ["lengths.bin", "scored.bin"] if self._has_masks else ["lengths.bin"]
        manifest = {
            "format_version": FORMAT_VERSION,
            "num_pairs": self.pairs_written,
            "content_digest": self._digest.hexdigest(),
            "longest_pair": self._longest,
            "columns_in_use": sorted(self._columns_in_use),
            **fields,
            "indexes": [asdict(self._describe(name)) for name in names],
            "shards": [asdict(shard) for shard in self._shards],
        }
        content = json.dumps(manifest, indent=1, ensure_ascii=False) + "\n"
        durable.write(self._content / "manifest.json", content.encode())
        self._staging.publish(overwrite=overwrite)
        return self._staging.output

    def _sync(self) -> dict[str, Any]:
        """Bring what is written to the disk; return what another process needs to go on after it."""
        durable.sync_stream(self._lengths)
        durable.sync_stream(self._scored)
        if self._writer is not None:
            durable.sync_file(self._shard_path)
        return {
            "shards": [asdict(shard) for shard in self._shards],
            "batches_in_shard": self._batches_in_shard,
            "has_masks": self._has_masks,
            "columns_in_use": sorted(self._columns_in_use),
            "longest_pair": self._longest,
        }

    def _close_files(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._sink.close()
            self._writer = None
        self._lengths.close()
        self._scored.close()

    def _write_pending(self, num_rows: int) -> None:
        table = pa.Table.from_batches(self._pending, schema=SCHEMA)
        self._pending = table.slice(num_rows).to_batches()
        self._num_pending -= num_rows
        self._write(rebuild_buffers(table.slice(0, num_rows).combine_chunks().to_batches()[0]))

    def _write(self, batch: Any) -> None:
        if self._writer is None:
            self._sink = pa.OSFile(str(self._shard_path), "wb")
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
        for name in _CONTENT_COLUMNS:
            rows[name] = fixed_width_values(batch.column(name), _CONTENT_DTYPE[name])
        self._digest.update(rows.tobytes())
        return rows

    def _write_lengths(self, batch: Any) -> None:
        lengths = lengths_of(batch)
        self._lengths.write(lengths.astype(LENGTH_DTYPE).tobytes())
        self._longest = max(self._longest, int((lengths[:, 0] + lengths[:, 1:].max(axis=1)).max()))
        scored = lengths[:, 1:].copy()
        for side, column in enumerate((batch.column("chosen_mask"), batch.column("rejected_mask"))):
            for row in np.flatnonzero(column.is_valid().to_numpy(zero_copy_only=False)):
                self._has_masks = True
                scored[row, side] = column[int(row)].values.true_count
        self._scored.write(scored.astype(LENGTH_DTYPE).tobytes())

    @property
    def _shard_path(self) -> Path:
        return self._content / f"shards/{len(self._shards):05d}.arrow"

    def _close_shard(self) -> None:
        self._writer.close()
        self._sink.close()
        self._writer = None
        self._shards.append(self._describe(f"shards/{self._shard_path.name}", self._pairs_in_shard))
        self._batches_in_shard = 0
        self._pairs_in_shard = 0

    def _describe(self, name: str, num_pairs: int = 0) -> StoreFile:
        path = self._content / name
        durable.sync_file(path)
        return StoreFile(name, path.stat().st_size, sha256_of_file(path), num_pairs)


def _content_columns(path: Path) -> Iterator[Any]:
    # named columns only, read and not mapped: mapped pages would count as memory of this process
    fields = [SCHEMA.get_field_index(name) for name in _CONTENT_COLUMNS]
    with pa.OSFile(str(path)) as stream:
        reader = pa.ipc.open_file(stream, options=pa.ipc.IpcReadOptions(included_fields=fields))
        for number in range(reader.num_record_batches):
            yield reader.get_batch(number)
