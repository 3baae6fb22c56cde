"""The reference cache: where the logps of one reference lie on disk, and how a run finds those of its pairs.

A cache directory holds one directory for each reference, named by its identity; in it `identity.json`, which says in
words whose logps these are, and shards. Processes and machines share it without a lock: shards appear whole and never
change, and a pair that two of them scored counts once, the oldest first, so that a run that goes on sees the same bits.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from thresher import durable
from thresher.checkpoint.json_io import Json, encode
from thresher.data.store.arrow_schema import find_sorted
from thresher.data.store.reader import HASH_BYTES, MAX_OPEN_SHARDS, Hashes
from thresher.errors import UserError
from thresher.redact import redact_text
from thresher.reference.fingerprint import SCORING_VERSION, ReferenceIdentity
from thresher.reference.shards import (
    DAMAGED,
    IDENTITY_NAME,
    OTHER_BYTES,
    PARTIAL,
    CacheShard,
    Logps,
    ShardFile,
    ShardLimits,
    ShardWriter,
    list_shards,
    read_keys,
    verify_shard,
)

logger = logging.getLogger(__name__)

_ROW_BITS = 32
_SORTABLE = np.dtype(f"S{HASH_BYTES}")
Positions = npt.NDArray[np.int64]


class ReferenceCache:
    """The cached logps of one reference; model is the path it was loaded from, a hint for people."""

    def __init__(self, root: Path, identity: ReferenceIdentity, model: str) -> None:
        self.directory = root / identity.digest[:32]
        self._identity = identity
        self._model = model
        self._sound: set[str] = set()
        with contextlib.suppress(OSError):  # absent, or for reading only
            os.utime(self.directory / IDENTITY_NAME)  # tells `thresher cache prune` that it is still of use

    def writer(self, limits: ShardLimits) -> ShardWriter:
        """Open the directory for writing, making it where there is none."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            if not (self.directory / IDENTITY_NAME).exists():
                self._write_identity()
        except OSError as error:
            raise UserError(
                f"the reference cache cannot be written in {self.directory}: {error.strerror or error}; set "
                "reference.cache_dir to a place that can"
            ) from error
        return ShardWriter(self.directory, limits)

    def find(self, keys: Hashes) -> FoundLogps:
        """Find pairs by their keys, in time O((run + cache) log run); damaged shards are told and left out."""
        # as strings of bytes: numpy sorts those. pyarrow's index_in would hash all of them again for every shard
        wanted, place_of_pair = np.unique(keys.view(_SORTABLE), return_inverse=True)
        locations = np.full(len(wanted), -1, dtype=np.int64)
        shards = list_shards(self.directory)
        # reading and hashing let other threads run: a few keep a fast disk busy
        with ThreadPoolExecutor(max_workers=4) as pool:
            for number, match in enumerate(pool.map(lambda shard: self._search(shard, wanted), shards)):
                if isinstance(match, str):
                    self._leave_out(shards[number], match)
                    continue
                rows = np.flatnonzero(match >= 0)
                # backwards, so that of several copies in one shard the first stays, as it does of several shards
                rows = rows[locations[match[rows]] < 0][::-1]
                locations[match[rows]] = (number << _ROW_BITS) + rows
        return FoundLogps(shards, locations[place_of_pair])

    def mark_verified(self, shards: list[ShardFile]) -> None:
        """Take shards that this process has just written as sound, without reading them again."""
        self._sound |= {shard.path.name for shard in shards}

    def _search(self, shard: ShardFile, wanted: npt.NDArray[np.bytes_]) -> Positions | str:
        """Match a shard's keys; one that is needed must prove its bytes. Say what is wrong with it, if anything."""
        match = None
        with contextlib.suppress(OSError, ValueError):  # not even an Arrow file: the digest will tell why
            match = find_sorted(read_keys(shard.path).view(_SORTABLE), wanted)
            if not (match >= 0).any() or shard.path.name in self._sound:
                return match
        fault = verify_shard(shard)
        if fault is None and match is not None:
            self._sound.add(shard.path.name)
            return match
        return fault or "is no shard that this version reads"

    def _leave_out(self, shard: ShardFile, fault: str) -> None:
        if fault == OTHER_BYTES:
            # set aside: it is told once, and every process agrees that its pairs are missing
            with contextlib.suppress(OSError):
                shard.path.rename(shard.path.with_name(shard.path.name + DAMAGED))
        logger.warning("reference cache: %s %s; those of its pairs that are needed are scored again", shard.path, fault)

    def _write_identity(self) -> None:
        created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        hints: dict[str, Json] = {
            "model": redact_text(self._model),
            "created": created,
            "scoring_version": SCORING_VERSION,
        }
        aside = self.directory / f"{PARTIAL}{secrets.token_hex(8)}"
        content = encode(hints | asdict(self._identity))
        durable.replace(self.directory / IDENTITY_NAME, content, temporary=aside)


class FoundLogps:
    """Where each of some pairs lies: a shard and a row, or nowhere. 8 bytes a pair; logps stay on disk."""

    def __init__(self, shards: list[ShardFile], locations: Positions) -> None:
        self._locations = locations
        self._shard = lru_cache(MAX_OPEN_SHARDS)(lambda number: _open_shard(shards[number].path))

    def is_missing(self, positions: Positions | slice = slice(None)) -> npt.NDArray[np.bool_]:
        return self._locations[positions] < 0

    def logps(self, position: int) -> tuple[Logps, Logps]:
        """Read the logps of one pair, chosen and rejected."""
        location = int(self._locations[position])
        if location < 0:
            raise KeyError(f"pair at position {position} was not found in the cache")
        return self._shard(location >> _ROW_BITS).logps(location & ((1 << _ROW_BITS) - 1))


def _open_shard(path: Path) -> CacheShard:
    try:
        return CacheShard(path)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path} was removed from the reference cache, or damaged, during this run ({error}); start the run "
            "again with resume_from_checkpoint=auto, and missing pairs are scored again"
        ) from error
