"""The reference cache: log-probabilities of one reference model on disk, and the lookup of a run's pairs.

The cache has one directory per reference, named by its fingerprint. It contains `identity.json`, a readable description
of the reference, and shards. Processes and machines share it without a lock: shards are published atomically and never
change. If two of them scored the same pair, the oldest result is used, so that a resumed run reads the same bits.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import time
from concurrent.futures import ThreadPoolExecutor
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
from thresher.reference.fingerprint import SCORING_VERSION, ReferenceFingerprint
from thresher.reference.shards import (
    DAMAGED,
    DIGEST_MISMATCH,
    IDENTITY_NAME,
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
    """The cached logps of one reference; model is the path it was loaded from, kept as a description."""

    def __init__(self, root: Path, fingerprint: ReferenceFingerprint, model: str) -> None:
        self.directory = root / fingerprint.digest[:32]
        self._fingerprint = fingerprint
        self._model = model
        self._verified: set[str] = set()
        with contextlib.suppress(OSError):  # absent or read-only
            os.utime(self.directory / IDENTITY_NAME)  # the time of last use, for `thresher cache prune`

    def writer(self, limits: ShardLimits) -> ShardWriter:
        """Open the directory for writing; create it if needed."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            if not (self.directory / IDENTITY_NAME).exists():
                self._write_description()
        except OSError as error:
            raise UserError(
                f"could not create the reference cache in {self.directory}: {error.strerror or error}; set "
                "reference.cache_dir to a writable directory"
            ) from error
        return ShardWriter(self.directory, limits)

    def find(self, keys: Hashes) -> FoundLogps:
        """Find pairs by their keys, in time O((run + cache) log run); skip damaged shards with a warning."""
        # as byte strings, which numpy can sort; pyarrow's index_in would hash all of them again for every shard
        wanted, inverse = np.unique(keys.view(_SORTABLE), return_inverse=True)
        locations = np.full(len(wanted), -1, dtype=np.int64)
        shards = list_shards(self.directory)
        # reading and hashing release the GIL, so a few threads keep a fast disk busy
        with ThreadPoolExecutor(max_workers=4) as pool:
            for number, match in enumerate(pool.map(lambda shard: self._search(shard, wanted), shards)):
                if isinstance(match, str):
                    self._quarantine(shards[number], match)
                    continue
                rows = np.flatnonzero(match >= 0)
                # backwards, so that the first of several copies in a shard wins, as the first of several shards does
                rows = rows[locations[match[rows]] < 0][::-1]
                locations[match[rows]] = (number << _ROW_BITS) + rows
        return FoundLogps(shards, locations[inverse])

    def mark_verified(self, shards: list[ShardFile]) -> None:
        """Count shards that this process has just written as valid, without reading them again."""
        self._verified |= {shard.path.name for shard in shards}

    def _search(self, shard: ShardFile, wanted: npt.NDArray[np.bytes_]) -> Positions | str:
        """Match a shard's keys, and verify its digest if any pair is needed; return what is wrong with it as text."""
        match = None
        with contextlib.suppress(OSError, ValueError):  # verify_shard below reports why it cannot be read
            match = find_sorted(read_keys(shard.path).view(_SORTABLE), wanted)
            if not (match >= 0).any() or shard.path.name in self._verified:
                return match
        problem = verify_shard(shard)
        if problem is None and match is not None:
            self._verified.add(shard.path.name)
            return match
        return problem or "is not a shard that this version can read"

    def _quarantine(self, shard: ShardFile, problem: str) -> None:
        if problem == DIGEST_MISMATCH:
            # renamed, so that it is reported once, and all processes agree that its pairs are missing
            with contextlib.suppress(OSError):
                shard.path.rename(shard.path.with_name(shard.path.name + DAMAGED))
        logger.warning("reference cache: %s %s; the pairs needed from it are scored again", shard.path, problem)

    def _write_description(self) -> None:
        created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        model = redact_text(self._model)
        description: dict[str, Json] = {"model": model, "created": created, "scoring_version": SCORING_VERSION}
        content = encode(description | self._fingerprint.content)
        temporary = self.directory / f"{PARTIAL}{secrets.token_hex(8)}"
        durable.replace(self.directory / IDENTITY_NAME, content, temporary=temporary)


class FoundLogps:
    """The shard and row of each requested pair, if it is cached. 8 bytes per pair; logps stay on disk."""

    def __init__(self, shards: list[ShardFile], locations: Positions) -> None:
        self._locations = locations
        self._shard = lru_cache(MAX_OPEN_SHARDS)(lambda number: _open_shard(shards[number].path))

    def is_missing(self, positions: Positions | slice = slice(None)) -> npt.NDArray[np.bool_]:
        return self._locations[positions] < 0

    def logps(self, position: int) -> tuple[Logps, Logps]:
        """Read the logps of one pair, chosen and rejected."""
        location = int(self._locations[position])
        if location < 0:
            raise KeyError(f"the pair at position {position} is not in the cache")
        return self._shard(location >> _ROW_BITS).logps(location & ((1 << _ROW_BITS) - 1))


def _open_shard(path: Path) -> CacheShard:
    try:
        return CacheShard(path)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path} was removed from the reference cache or damaged during this run ({error}); rerun with "
            "resume_from_checkpoint=auto to score the missing pairs again"
        ) from error
