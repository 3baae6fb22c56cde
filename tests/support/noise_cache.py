"""Random pairs and a reference without a model, for tests of the cache itself."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from tests.support.engines.config_runs import world_of_pool
from thresher.data.batching.batches import Blocks
from thresher.data.batching.plan import PairSet
from thresher.data.example import Example, ExampleBatch
from thresher.data.store.arrow_schema import hash_example
from thresher.distributed.groups import SINGLE_PROCESS, Group
from thresher.losses.pairs import ExampleLogps, ResponseLogps
from thresher.reference import fingerprint
from thresher.reference.cache import FoundLogps, ReferenceCache
from thresher.reference.fingerprint import ReferenceFingerprint
from thresher.reference.scorers import PrecomputedReference

FINGERPRINT = ReferenceFingerprint(weights="w", settings="s", dtype="fp32", master_dtype="fp32")


class NoisePairs:
    """Pairs of random tokens; hashes are yielded in pieces, as from the shards of a store."""

    def __init__(self, count: int, seed: int = 0) -> None:
        draw = np.random.default_rng(seed)

        def tokens(max_length: int) -> np.ndarray:
            return draw.integers(0, 1000, draw.integers(1, max_length + 1)).astype(np.int32)

        self.pairs = [Example.pair(tokens(4), tokens(9), tokens(9)) for _ in range(count)]

    def __len__(self) -> int:
        return len(self.pairs)

    def read(self, pair_ids: np.ndarray) -> ExampleBatch:
        return ExampleBatch(np.asarray(pair_ids), tuple(self.pairs[int(i)] for i in pair_ids))

    @property
    def parts(self) -> dict[str, NoisePairs]:
        return {"": self}

    @property
    def digest(self) -> str:
        return hashlib.sha256(b"".join(each.tobytes() for each in self.hashes())).hexdigest()

    def hashes(self) -> Iterator[np.ndarray]:
        for start in range(0, len(self.pairs), 5):
            keys = [hash_example(pair).pair for pair in self.pairs[start : start + 5]]
            yield np.frombuffer(b"".join(keys), dtype="V16")


def synthetic_logps(batch: ExampleBatch) -> ExampleLogps:
    """A value per token that depends on the pair and, in its last bits, on the size of the batch."""

    def side(number: int) -> ResponseLogps:
        responses = [pair.responses[number].ids for pair in batch.pairs]
        values = np.concatenate([-(np.sin(ids + 1.0) ** 2) for ids in responses]) * (1 + 1e-6 * len(batch))
        lengths = torch.tensor([len(ids) for ids in responses])
        return ResponseLogps(torch.from_numpy(values.astype(np.float32)), lengths)

    return ExampleLogps(tuple(side(number) for number in range(batch.num_sides)))


def open_cache(root: Path) -> ReferenceCache:
    return ReferenceCache(root, FINGERPRINT, "synthetic")


def lookup(
    root: Path,
    pairs: NoisePairs,
    pair_ids: np.ndarray | None = None,
    pairs_per_block: int = 4,
    group: Group = SINGLE_PROCESS,
    found: FoundLogps | None = None,
) -> PrecomputedReference:
    return PrecomputedReference(
        open_cache(root),
        pairs,
        None if pair_ids is None else lambda: PairSet.of(len(pairs), pair_ids),
        blocks=Blocks.by_pairs(len(pairs), pairs_per_block),
        device=torch.device("cpu"),
        num_visits=len(pairs) if pair_ids is None else len(pair_ids),
        group=group,
        found=found,
    )


def all_bytes(reference: PrecomputedReference, pairs: NoisePairs) -> bytes:
    """The logps of all pairs, as bytes."""
    sides = reference.logps(pairs.read(np.arange(len(pairs))))
    return sides.chosen.values.numpy().tobytes() + sides.rejected.values.numpy().tobytes()


class Keys:
    """Rows without content, to be found by their keys; two objects have different digests."""

    def __init__(self, keys: np.ndarray, rows_at_a_time: int = 100) -> None:
        self._keys, self._step = keys, rows_at_a_time
        self.digest = hashlib.sha256(b"rows " + keys.tobytes()).hexdigest()

    def __len__(self) -> int:
        return len(self._keys)

    def hashes(self) -> Iterator[np.ndarray]:
        for start in range(0, len(self), self._step):
            yield self._keys[start : start + self._step]


def find(cache: ReferenceCache, keys: np.ndarray) -> FoundLogps:
    """Look up keys, none of which a shard lists."""
    return cache.find([Keys(keys)], PairSet(len(keys)))


def found_by_rank(root: Path, num_pairs: int) -> tuple[int, bytes]:
    """Look up pairs together with the other ranks of a pool; return the bytes hashed by this one, and all logps."""
    sizes, original = list[int](), fingerprint.sha256_of_file

    def counted(path: Path) -> str:
        sizes.append(path.stat().st_size)
        return original(path)

    pairs = NoisePairs(num_pairs)
    fingerprint.sha256_of_file = counted
    try:
        found = lookup(root, pairs, group=world_of_pool())
    finally:
        fingerprint.sha256_of_file = original
    return sum(sizes), all_bytes(found, pairs)
