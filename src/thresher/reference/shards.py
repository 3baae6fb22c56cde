"""Shards of the reference cache: immutable files with the per-token logps of some pairs.

A shard is an Arrow IPC file of one record batch. Its name contains the time of writing, the number of pairs and the
SHA-256 of the file. Many processes write into one directory without a lock, because each file is written under a
temporary name, flushed and renamed.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from thresher import durable
from thresher.data.store.arrow_schema import list_array
from thresher.data.store.reader import HASH_BYTES, HASH_DTYPE, Hashes, fixed_width_values, list_views, sha256_of_file

Logps = npt.NDArray[np.float32]

_LOGPS = pa.list_(pa.field("item", pa.float32(), nullable=False))
SCHEMA = pa.schema(
    [
        pa.field("key", pa.binary(HASH_BYTES), nullable=False),
        pa.field("chosen", _LOGPS, nullable=False),
        pa.field("rejected", _LOGPS, nullable=False),
    ]
)
IDENTITY_NAME = "identity.json"
PARTIAL = ".partial-"
DAMAGED = ".damaged"
DIGEST_MISMATCH = "does not match the digest in its name"
_NAME = re.compile(r"(\d{13})-(\d+)-([0-9a-f]{64})\.arrow")


@dataclass(frozen=True)
class ShardFile:
    """A shard as described by its file name; created is in seconds since 1970."""

    path: Path
    created: float
    num_pairs: int
    sha256: str

    @classmethod
    def parse(cls, path: Path) -> ShardFile | None:
        match = _NAME.fullmatch(path.name)
        return None if match is None else cls(path, int(match[1]) / 1000, int(match[2]), match[3])


def list_shards(directory: Path) -> list[ShardFile]:
    """List the shards of a directory, oldest first."""
    if not directory.is_dir():
        return []
    # names begin with the time; the digest breaks ties
    found = [ShardFile.parse(path) for path in sorted(directory.iterdir())]
    return [shard for shard in found if shard is not None]


def verify_shard(shard: ShardFile) -> str | None:
    """Check a shard against its digest; return what is wrong with it, or None."""
    try:
        return None if sha256_of_file(shard.path) == shard.sha256 else DIGEST_MISMATCH
    except OSError as error:
        return f"cannot be read ({error.strerror or error})"


class CacheShard:
    """A shard mapped into memory."""

    def __init__(self, path: Path) -> None:
        reader = pa.ipc.open_file(pa.memory_map(str(path)))
        if not reader.schema.equals(SCHEMA) or reader.num_record_batches != 1:
            raise ValueError("unexpected columns")
        batch = reader.get_batch(0)
        # without this, lists that extend beyond the file would crash the process
        batch.validate()
        self.keys: Hashes = fixed_width_values(batch.column(0), HASH_DTYPE)
        self._sides = [list_views(batch.column(at)) for at in (1, 2)]

    def logps(self, row: int) -> tuple[Logps, Logps]:
        """Return the logps of one pair, chosen and rejected, as views of the file."""
        chosen, rejected = (values[offsets[row] : offsets[row + 1]] for offsets, values in self._sides)
        return chosen, rejected


def read_keys(path: Path) -> Hashes:
    """Copy the keys of a shard; raise ValueError or OSError for a file that is not a shard."""
    return CacheShard(path).keys.copy()


@dataclass(frozen=True)
class ShardLimits:
    """When a shard is written: at num_bytes of logps, or seconds after its first pair. A kill loses less than one."""

    num_bytes: int = 64 * 2**20
    seconds: float = 60.0


class ShardWriter:
    """Collect logps and write them as shards; the end of the `with` block writes the rest, also after an error."""

    def __init__(self, directory: Path, limits: ShardLimits) -> None:
        self.written: list[ShardFile] = []
        self._directory = directory
        self._limits = limits
        self._pairs: list[tuple[bytes, Logps, Logps]] = []
        self._num_bytes = 0
        self._started = 0.0

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._flush()

    def add(self, key: bytes, chosen: Logps, rejected: Logps) -> None:
        """Add one pair's logps."""
        if not self._pairs:
            self._started = time.monotonic()
        self._pairs.append((key, chosen, rejected))
        self._num_bytes += HASH_BYTES + chosen.nbytes + rejected.nbytes

    def end_block(self) -> None:
        """Write the shard if it is full; a block is never divided between shards."""
        if self._num_bytes >= self._limits.num_bytes or time.monotonic() - self._started >= self._limits.seconds:
            self._flush()

    def _flush(self) -> None:
        if self._pairs:
            pairs = self._pairs
            # cleared first: __exit__ must not retry a failed write
            self._pairs, self._num_bytes = [], 0
            self.written.append(write_shard(self._directory, *zip(*pairs, strict=True)))


def write_shard(
    directory: Path, keys: Sequence[bytes], chosen: Sequence[Logps], rejected: Sequence[Logps]
) -> ShardFile:
    """Write logps as a shard, atomically and flushed to the disk."""
    content = _to_arrow(keys, chosen, rejected)
    sha256 = hashlib.sha256(content).hexdigest()
    created = time.time_ns() // 1_000_000
    path = directory / f"{created:013d}-{len(keys)}-{sha256}.arrow"
    temporary = directory / f"{PARTIAL}{secrets.token_hex(8)}"
    with durable.translate_os_errors(
        f"could not write to the reference cache in {directory}",
        if_full="free some space there (`thresher cache prune`)",
        also=", or set reference.cache_dir to another directory",
    ):
        durable.replace(path, content, temporary=temporary)
    return ShardFile(path, created / 1000, len(keys), sha256)


def _to_arrow(keys: Sequence[bytes], chosen: Sequence[Logps], rejected: Sequence[Logps]) -> Any:
    hashes = pa.Array.from_buffers(pa.binary(HASH_BYTES), len(keys), [None, pa.py_buffer(b"".join(keys))])
    columns = [hashes, list_array(chosen, _LOGPS), list_array(rejected, _LOGPS)]
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, SCHEMA) as writer:
        writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=SCHEMA))
    return sink.getvalue()
