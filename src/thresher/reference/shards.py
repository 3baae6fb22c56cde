"""The files of the reference cache: per-token logps of some pairs, written once and never changed.

A shard is an Arrow IPC file of one record batch. Its name tells when it was written, how many pairs it holds and the
SHA-256 of its bytes, so that a shard proves itself, and many processes write into one directory without a lock: each
writes aside, flushes and renames.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from thresher import durable
from thresher.data.store.arrow_schema import list_array
from thresher.data.store.reader import HASH_BYTES, HASH_DTYPE, Hashes, fixed_width_values, sha256_of_file

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
OTHER_BYTES = "has other bytes than were written"
_NAME = re.compile(r"(\d{13})-(\d+)-([0-9a-f]{64})\.arrow")


@dataclass(frozen=True)
class ShardFile:
    """A shard as its name tells it; created is in seconds since 1970."""

    path: Path
    created: float
    num_pairs: int
    sha256: str

    @classmethod
    def parse(cls, path: Path) -> ShardFile | None:
        match = _NAME.fullmatch(path.name)
        return None if match is None else cls(path, int(match[1]) / 1000, int(match[2]), match[3])


def list_shards(directory: Path) -> list[ShardFile]:
    """Name the shards of a directory, oldest first."""
    if not directory.is_dir():
        return []
    # names begin with the time, so this order is that of time; the digest decides between equals
    found = [ShardFile.parse(path) for path in sorted(directory.iterdir())]
    return [shard for shard in found if shard is not None]


def verify_shard(shard: ShardFile) -> str | None:
    """Read every byte of a shard; say what is wrong with it, or None."""
    try:
        return None if sha256_of_file(shard.path) == shard.sha256 else OTHER_BYTES
    except OSError as error:
        return f"cannot be read ({error.strerror or error})"


class CacheShard:
    """A shard mapped into memory."""

    def __init__(self, path: Path) -> None:
        reader = pa.ipc.open_file(pa.memory_map(str(path)))
        if not reader.schema.equals(SCHEMA) or reader.num_record_batches != 1:
            raise ValueError("other columns than a shard has")
        batch = reader.get_batch(0)
        # lengths that reach beyond the file would otherwise be read, and end the process
        batch.validate()
        self.keys: Hashes = fixed_width_values(batch.column(0), HASH_DTYPE)
        self._sides = [(batch.column(at).offsets.to_numpy(), batch.column(at).values.to_numpy()) for at in (1, 2)]

    def logps(self, row: int) -> tuple[Logps, Logps]:
        """Give the logps of one pair, chosen and rejected, as views of the file."""
        chosen, rejected = (values[offsets[row] : offsets[row + 1]] for offsets, values in self._sides)
        return chosen, rejected


def read_keys(path: Path) -> Hashes:
    """Copy the keys of a shard; a file that is no shard raises ValueError or OSError."""
    return CacheShard(path).keys.copy()


@dataclass(frozen=True)
class ShardLimits:
    """When a shard is full: at so many bytes of logps, or so long after its first pair. A kill loses less than one."""

    num_bytes: int = 64 * 2**20
    seconds: float = 60.0


class ShardWriter:
    """Collect logps and write them as shards; leaving the `with` block writes the rest, after an error as well."""

    def __init__(self, directory: Path, limits: ShardLimits) -> None:
        self.written: list[ShardFile] = []
        self._directory = directory
        self._limits = limits
        self._keys: list[bytes] = []
        self._chosen: list[Logps] = []
        self._rejected: list[Logps] = []
        self._num_bytes = 0
        self._started = 0.0

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._flush()

    def add(self, key: bytes, chosen: Logps, rejected: Logps) -> None:
        """Take one pair's logps."""
        if not self._keys:
            self._started = time.monotonic()
        self._keys.append(key)
        self._chosen.append(chosen)
        self._rejected.append(rejected)
        self._num_bytes += HASH_BYTES + chosen.nbytes + rejected.nbytes

    def end_block(self) -> None:
        """Write a shard if this one is full; blocks are scored whole, so they are kept whole."""
        if self._num_bytes >= self._limits.num_bytes or time.monotonic() - self._started >= self._limits.seconds:
            self._flush()

    def _flush(self) -> None:
        if not self._keys:
            return
        keys, chosen, rejected = self._keys, self._chosen, self._rejected
        # taken first: a disk that is full must not be tried again on the way out
        self._keys, self._chosen, self._rejected, self._num_bytes = [], [], [], 0
        self.written.append(write_shard(self._directory, keys, chosen, rejected))


def write_shard(
    directory: Path, keys: Sequence[bytes], chosen: Sequence[Logps], rejected: Sequence[Logps]
) -> ShardFile:
    """Write logps aside, flush them to the disk, and let them appear under the name that proves them."""
    content = _to_arrow(keys, chosen, rejected)
    sha256 = hashlib.sha256(content).hexdigest()
    created = time.time_ns() // 1_000_000
    path = directory / f"{created:013d}-{len(keys)}-{sha256}.arrow"
    aside = directory / f"{PARTIAL}{secrets.token_hex(8)}"
    with durable.translate_os_errors(
        f"could not write to the reference cache in {directory}",
        if_full="free some space there (`thresher cache prune`)",
        also=", or set reference.cache_dir to another one",
    ):
        durable.replace(path, content, temporary=aside)
    return ShardFile(path, created / 1000, len(keys), sha256)


def _to_arrow(keys: Sequence[bytes], chosen: Sequence[Logps], rejected: Sequence[Logps]) -> Any:
    columns = [pa.array(keys, pa.binary(HASH_BYTES)), list_array(chosen, _LOGPS), list_array(rejected, _LOGPS)]
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, SCHEMA) as writer:
        writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=SCHEMA))
    return sink.getvalue()
