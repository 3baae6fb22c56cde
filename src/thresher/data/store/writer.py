"""Write a store: the output directory is complete or absent, and an interrupted write can be resumed.

The bytes depend only on the pairs and on `shard_rows`, not on the sizes of the appended batches or on interruptions:
every record batch has a fixed number of rows.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from thresher import durable
from thresher.data.example import StoredKind, kind_of
from thresher.data.store.arrow_schema import lengths_of, rebuild_buffers, scored_lengths_of
from thresher.data.store.reader import (
    FORMAT_VERSION,
    HASH_BYTES,
    HASH_DTYPE,
    LENGTH_DTYPE,
    RESPONSES_VERSION,
    ROWS_PER_RECORD_BATCH,
    StoreFile,
    fixed_width_values,
    schema_of,
    sha256_of_file,
)
from thresher.errors import UserError

_PROGRESS = "progress.json"


# most pairs to repeat after a crash; a checkpoint takes a few hundredths of a second
PAIRS_PER_CHECKPOINT = 32_768
_CONTENT_DTYPE = np.dtype([("hash", HASH_DTYPE), ("weight", "<f4"), ("margin", "<f4")])
_CONTENT_COLUMNS = _CONTENT_DTYPE.names or ()
_DIGESTED_LISTS: Mapping[StoredKind, tuple[str, ...]] = {
    "pairs": (),
    "weighted_pairs": ("chosen_weights", "rejected_weights"),
    "labels": ("values",),
    "lists": ("values",),
}
_ROWS_PER_COPY = 65_536
# an Arrow file is a magic string padded to 8 bytes, a stream, and a footer
_STREAM_START = 8


class StoreWriter:
    """Write record batches into shards in the staging directory; `finish` renames it to the output."""

    def __init__(
        self,
        output: Path,
        shard_rows: int,
        fingerprint: str | None = None,
        kind: StoredKind = "pairs",
        extra_columns: Sequence[str] = (),
    ) -> None:
        self._stored_kind, self._kind, self._extra_columns = kind, kind_of(kind), tuple(extra_columns)
        self._schema = schema_of(kind, extra_columns)
        self._shard_rows = shard_rows
        self._rows_per_batch = min(ROWS_PER_RECORD_BATCH, shard_rows)
        self.staging = Staging(output, fingerprint)
        self._content = self.staging.content
        try:
            self._begin(self.staging.state["files"] if self.staging.state else {})
        except (pa.ArrowInvalid, OSError):
            if self.staging.state is None:
                raise
            # the staged files are corrupt; everything in them can be recomputed
            self.staging.clear()
            self._begin({})
        state = self.staging.state
        # the last argument of `checkpoint` if an interrupted write is resumed
        self.resumed: Mapping[str, Any] | None = state["caller"] if state else None
        self._pairs_per_checkpoint = min(shard_rows, PAIRS_PER_CHECKPOINT)
        self._pairs_saved = self.pairs_written

    def _begin(self, state: Mapping[str, Any]) -> None:
        """Open the files and keep the pairs of an interrupted write, whose last `_sync` returned this state."""
        (self._content / "shards").mkdir(exist_ok=True)
        self._pending: list[Any] = []
        self._num_pending = 0
        self._shards = [StoreFile(**shard) for shard in state.get("shards", ())]
        # in complete record batches, which `checkpoint` keeps; the rest are pending in memory
        self.pairs_written = sum(shard.num_pairs for shard in self._shards)
        self._sink: Any = None
        self._writer: Any = None
        self._batches_in_shard = self._pairs_in_shard = 0
        self._num_responses = int(state.get("num_responses", 2 if self._kind == "pairs" else 1))
        self._indexes = self._open_indexes(self.pairs_written)
        self._has_masks = bool(state.get("has_masks"))
        self._columns_in_use: set[str] = set(state.get("columns_in_use", ()))
        self._longest = int(state.get("longest_pair", 0))
        self._digest = hashlib.sha256()
        digested = (*_DIGESTED_LISTS[self._stored_kind], *self._extra_columns)
        self._column_digests = {name: hashlib.sha256() for name in digested}
        for shard in self._shards:
            for batch in _content_columns(self._content / shard.name, self._schema, digested):
                self._digest_content(batch)
        if num_batches := int(state.get("batches_in_shard", 0)):
            self._copy_torn_shard(num_batches)

    @property
    def _index_paths(self) -> dict[str, tuple[Path, int]]:
        """The staged indexes with their widths; lists may get longer, so their widths are in the names."""
        width, size = self._num_responses, LENGTH_DTYPE.itemsize
        if self._kind == "pairs":
            return {
                "lengths": (self._content / "lengths.bin", 3 * size),
                "scored": (self._content / "scored.bin", 2 * size),
            }
        directory = self.staging.directory
        return {
            "lengths": (directory / f"lengths-{width}.bin", (1 + width) * size),
            "scored": (directory / f"scored-{width}.bin", width * size),
            "prompts": (directory / "prompts.bin", HASH_BYTES),
        }

    def _open_indexes(self, num_rows: int) -> dict[str, BinaryIO]:
        for name, (path, _) in self._index_paths.items():
            # after a crash between `finish` and the publication
            if not path.exists() and (moved := self._content / f"{name}.bin").exists():
                moved.rename(path)
        return {name: open_at(path, width * num_rows) for name, (path, width) in self._index_paths.items()}

    def _widen(self, num_responses: int) -> None:
        """Copy the lengths into wider files; a resume from the last checkpoint needs the narrow ones."""
        narrow = self._index_paths
        for name in ("lengths", "scored"):
            self._indexes[name].close()
        self._num_responses = num_responses
        for name in ("lengths", "scored"):
            (source, old), (path, new) = narrow[name], self._index_paths[name]
            self._indexes[name] = open_at(path, 0)
            with source.open("rb") as stream:
                while len(values := np.fromfile(stream, LENGTH_DTYPE, old // LENGTH_DTYPE.itemsize * _ROWS_PER_COPY)):
                    rows = values.reshape(-1, old // LENGTH_DTYPE.itemsize)
                    self._indexes[name].write(
                        np.pad(rows, ((0, 0), (0, (new - old) // LENGTH_DTYPE.itemsize))).tobytes()
                    )

    def _copy_torn_shard(self, num_batches: int) -> None:
        """Copy the first record batches of the shard that was open at a crash."""
        # renamed first: a crash during the copy leaves it intact
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

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._close_files()
        self.staging.close(failed=kind is not None)

    @property
    def num_pairs(self) -> int:
        """Number of appended pairs, written or pending."""
        return self.pairs_written + self._num_pending

    @property
    def checkpoint_due(self) -> bool:
        return self.pairs_written - self._pairs_saved >= self._pairs_per_checkpoint

    def append(self, batch: Any) -> None:
        """Append examples, as returned by `pairs_to_record_batch`."""
        if batch.num_rows == 0:
            return
        self._pending.append(batch)
        self._num_pending += batch.num_rows
        while self._num_pending >= (wanted := min(self._rows_per_batch, self._shard_rows - self._pairs_in_shard)):
            self._write_pending(wanted)

    def checkpoint(self, caller: Mapping[str, Any]) -> None:
        """Save the progress; a later process can resume here with `caller` as its `resumed`."""
        self.staging.save({"files": self._sync(), "caller": caller})
        self._pairs_saved = self.pairs_written

    def finish(self, fields: Mapping[str, Any], *, overwrite: bool = False) -> Path:
        """Write the pending pairs and the manifest, with extra fields, and publish the store."""
        if self._num_pending:
            self._write_pending(self._num_pending)
        if self._writer is not None:
            self._close_shard()
        self._close_files()
        paths = {name: path for name, (path, _) in self._index_paths.items()}
        if not self._has_masks:
            paths.pop("scored").unlink()
        for name, path in paths.items():
            path.replace(self._content / f"{name}.bin")
        digest, of_kind = self._digest.hexdigest(), dict[str, Any]()
        if self._column_digests or self._stored_kind != "pairs":
            digests = (self._digest, *self._column_digests.values())
            digest = hashlib.sha256(b"".join(each.digest() for each in digests)).hexdigest()
            of_kind = {"kind": self._stored_kind, "num_responses": self._num_responses}
        if self._extra_columns:
            of_kind["extra_columns"] = list(self._extra_columns)
        manifest = {
            "format_version": RESPONSES_VERSION if of_kind else FORMAT_VERSION,
            **of_kind,
            "num_pairs": self.pairs_written,
            "content_digest": digest,
            "longest_pair": self._longest,
            "columns_in_use": sorted(self._columns_in_use),
            **fields,
            "indexes": [asdict(self._describe(f"{name}.bin")) for name in paths],
            "shards": [asdict(shard) for shard in self._shards],
        }
        content = json.dumps(manifest, indent=1, ensure_ascii=False) + "\n"
        durable.write(self._content / "manifest.json", content.encode())
        self.staging.publish(overwrite=overwrite)
        return self.staging.output

    def _sync(self) -> dict[str, Any]:
        """Flush all files to the disk; return the state that `_begin` needs to resume."""
        for stream in self._indexes.values():
            durable.sync_stream(stream)
        if self._writer is not None:
            durable.sync_file(self._shard_path)
        return {
            "shards": [asdict(shard) for shard in self._shards],
            "batches_in_shard": self._batches_in_shard,
            "has_masks": self._has_masks,
            "columns_in_use": sorted(self._columns_in_use),
            "longest_pair": self._longest,
            "num_responses": self._num_responses,
        }

    def _close_files(self) -> None:
        if self._writer is not None:
            self._close_writer()
        for stream in self._indexes.values():
            stream.close()

    def _close_writer(self) -> None:
        self._writer.close()
        self._sink.close()
        self._writer = None

    def _write_pending(self, num_rows: int) -> None:
        table = pa.Table.from_batches(self._pending, schema=self._schema)
        self._pending = table.slice(num_rows).to_batches()
        self._num_pending -= num_rows
        self._write(rebuild_buffers(table.slice(0, num_rows).combine_chunks().to_batches()[0]))

    def _write(self, batch: Any) -> None:
        if self._writer is None:
            self._sink = pa.OSFile(str(self._shard_path), "wb")
            self._writer = pa.ipc.new_file(self._sink, self._schema)
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
        # row by row: the digest must not depend on batch boundaries
        rows = np.empty(batch.num_rows, dtype=_CONTENT_DTYPE)
        for name in _CONTENT_COLUMNS:
            rows[name] = fixed_width_values(batch.column(name), _CONTENT_DTYPE[name])
        self._digest.update(rows.tobytes())
        for name, digest in self._column_digests.items():
            column = batch.column(name)
            is_list = pa.types.is_list(column.type)
            values = column.flatten().to_numpy() if is_list else fixed_width_values(column, _bytes_of(column.type))
            digest.update(values.tobytes())
        return rows

    def _write_lengths(self, batch: Any) -> None:
        lengths = lengths_of(batch)
        if (num_responses := lengths.shape[1] - 1) > self._num_responses:
            self._widen(num_responses)
        lengths = np.pad(lengths, ((0, 0), (0, self._num_responses - num_responses)))
        self._indexes["lengths"].write(lengths.astype(LENGTH_DTYPE).tobytes())
        self._longest = max(self._longest, int((lengths[:, 0] + lengths[:, 1:].max(axis=1)).max()))
        scored = scored_lengths_of(batch, lengths)
        self._has_masks |= scored is not None
        self._indexes["scored"].write((lengths[:, 1:] if scored is None else scored).astype(LENGTH_DTYPE).tobytes())
        if "prompts" in self._indexes:
            self._indexes["prompts"].write(fixed_width_values(batch.column("prompt_hash"), HASH_DTYPE).tobytes())

    @property
    def _shard_path(self) -> Path:
        return self._content / f"shards/{len(self._shards):05d}.arrow"

    def _close_shard(self) -> None:
        self._close_writer()
        self._shards.append(self._describe(f"shards/{self._shard_path.name}", self._pairs_in_shard))
        self._batches_in_shard = self._pairs_in_shard = 0

    def _describe(self, name: str, num_pairs: int = 0) -> StoreFile:
        path = self._content / name
        durable.sync_file(path)
        return StoreFile(name, path.stat().st_size, sha256_of_file(path), num_pairs)


def _bytes_of(arrow_type: Any) -> np.dtype[Any]:
    return np.dtype(f"V{arrow_type.byte_width}")


def _content_columns(path: Path, schema: Any, names: Sequence[str]) -> Iterator[Any]:
    # read, not mapped: mapped pages would count as memory of this process
    fields = sorted(schema.get_field_index(name) for name in (*_CONTENT_COLUMNS, *names))
    with pa.OSFile(str(path)) as stream:
        reader = pa.ipc.open_file(stream, options=pa.ipc.IpcReadOptions(included_fields=fields))
        for number in range(reader.num_record_batches):
            yield reader.get_batch(number)


class Staging:
    """The staging directory of an output: a hidden directory next to it, renamed into place when it is complete.

    A lock admits one process at a time. After a crash, a process with the same fingerprint, a digest of everything that
    determines the bytes of the output, continues from `state`, the last argument of `save`. Other work is deleted.
    """

    def __init__(self, output: Path, fingerprint: str | None = None) -> None:
        self.output = output
        # callers may put temporary files into it; it is deleted when the output is published
        self.directory = output.parent / f".{output.name}.partial"
        self._replaced = self.directory / "replaced"
        self._fingerprint = fingerprint
        self._lock = self._acquire()
        # a crash between the two renames of `publish`
        if self._replaced.exists() and not output.exists():
            self._replaced.rename(output)
        self.state: dict[str, Any] | None = self._read_state()
        if self.state is None:
            self.clear()
        self._is_resumable = self.state is not None

    @property
    def content(self) -> Path:
        """The directory that becomes the output."""
        return self.directory / "content"

    def close(self, *, failed: bool) -> None:
        """Release the lock; delete everything except work that a later process can resume."""
        if not failed or not self._is_resumable:
            shutil.rmtree(self.directory, ignore_errors=True)
        os.close(self._lock)

    def save(self, state: Mapping[str, Any]) -> None:
        """Record the progress; the files that `state` describes must already be flushed to the disk."""
        content = json.dumps({"fits": self._fingerprint, "state": state})
        durable.replace(self.directory / _PROGRESS, content.encode())
        self._is_resumable = self._fingerprint is not None

    def clear(self) -> None:
        """Delete all staged work."""
        for entry in self.directory.iterdir():
            durable.remove(entry)
        self.content.mkdir()
        self.state = None
        self._is_resumable = False

    def discard(self) -> None:
        """Delete staged work on close: a resumed run would fail in the same way."""
        self._is_resumable = False

    def publish(self, *, overwrite: bool) -> None:
        """Rename the content to the output; an old store is moved aside first, so no partial one is ever visible."""
        check_output(self.output, overwrite=overwrite)
        if self.output.exists():
            self.output.rename(self._replaced)
        self.content.rename(self.output)

    def _acquire(self) -> int:
        self.output.parent.mkdir(parents=True, exist_ok=True)
        durable.refuse_link(self.directory)
        while True:
            self.directory.mkdir(exist_ok=True)
            try:
                lock = os.open(self.directory, os.O_RDONLY)
            except FileNotFoundError:
                continue
            if not durable.lock(lock):
                os.close(lock)
                raise UserError(
                    f"another process is writing {self.output}; wait for it, or choose a different directory"
                )
            if durable.is_open_file(self.directory, lock):
                return lock
            os.close(lock)

    def _read_state(self) -> dict[str, Any] | None:
        try:
            found = json.loads((self.directory / _PROGRESS).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        matches = self._fingerprint is not None and found["fits"] == self._fingerprint and self.content.is_dir()
        return found["state"] if matches else None


def open_at(path: Path, size: int) -> BinaryIO:
    """Truncate a file to `size` bytes and open it for appending."""
    stream = path.open("ab")
    stream.truncate(size)
    return stream


def quarantine_file(store: Path) -> Path:
    """Return the file next to a store with the rows that were rejected."""
    return store.with_name(f"{store.name}.quarantine.jsonl")


def check_output(output: Path, *, overwrite: bool) -> None:
    """Raise if the output directory exists, unless it is empty or a store that may be overwritten."""
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return
    if not overwrite:
        raise UserError(
            f"{output} already exists; choose a different directory, or pass --overwrite to replace a store"
        )
    if not (output / "manifest.json").is_file():
        raise UserError(f"{output} is not a pair store and will not be overwritten; choose a different directory")
