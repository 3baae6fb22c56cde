"""Growth of the reference cache: start, peak memory and hashed bytes by number of pairs and ranks.

    python benchmarks/growth_cache.py 1000000 10000000 --ranks 1 2 4

Synthetic keys and logps of one token; each measurement is a fresh process with a fresh record of what was verified. 100
million pairs need 8 GB in the temporary directory. With PYTHONPATH at the sources of another version, it measures that
one.
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import json
import os
import pickle
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

PAIRS_PER_SHARD = 16_384  # 64 MB of logps at 512 tokens per response
PAIRS_PER_HASH_BLOCK = 524_288  # those of a shard of a store
STEPS, PAIRS_PER_STEP = 20, 1024
ORDERS = ("same store", "other order")


def keys_of(rows: np.ndarray) -> np.ndarray:
    """Return keys as blake2b would distribute them: two mixed halves (SplitMix64)."""
    halves = np.empty((len(rows), 2), dtype=np.uint64)
    for at, seed in enumerate((1, 2)):
        mixed = rows.astype(np.uint64) + np.uint64(seed * 0x9E3779B97F4A7C15 % 2**64)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
        halves[:, at] = mixed ^ (mixed >> np.uint64(31))
    return halves.view("V16")[:, 0]


def value_of(rows: np.ndarray) -> np.ndarray:
    """Return the logp of each row, exact in fp32."""
    return (rows % 2**24).astype(np.float32)


class SyntheticPairs:
    """What the cache reads of a store: keys of the rows 0, 1, ..., or of an affine permutation of them."""

    unit = "pairs"

    def __init__(self, num_pairs: int, order: str) -> None:
        self.num_pairs, self.order = num_pairs, order
        self.digest = f"synthetic {num_pairs} {order}"
        self.lengths = np.broadcast_to(np.array([[100, 200, 200]], np.uint32), (num_pairs, 3))

    @property
    def parts(self) -> dict[str, SyntheticPairs]:
        return {"": self}

    def __len__(self) -> int:
        return self.num_pairs

    def rows(self, ids: np.ndarray) -> np.ndarray:
        # a prime that divides none of the sizes; the product stays below 2**63
        return ids if self.order == ORDERS[0] else (ids * 1_000_000_007 + 12_345) % self.num_pairs

    def hashes(self) -> Iterator[np.ndarray]:
        for start in range(0, self.num_pairs, PAIRS_PER_HASH_BLOCK):
            yield keys_of(self.rows(np.arange(start, min(start + PAIRS_PER_HASH_BLOCK, self.num_pairs))))


def write_shards(directory: Path, num_pairs: int) -> None:
    """Write shards as a run over the pairs in their first order does."""
    directory.mkdir(parents=True)
    logps = pa.list_(pa.field("item", pa.float32(), nullable=False))
    fields = [pa.field("key", pa.binary(16), nullable=False)]
    schema = pa.schema(fields + [pa.field(name, logps, nullable=False) for name in ("chosen", "rejected")])
    digest = SyntheticPairs(num_pairs, ORDERS[0]).digest
    for number, start in enumerate(range(0, num_pairs, PAIRS_PER_SHARD)):
        rows = np.arange(start, min(start + PAIRS_PER_SHARD, num_pairs))
        keys = pa.Array.from_buffers(pa.binary(16), len(rows), [None, pa.py_buffer(keys_of(rows).tobytes())])
        offsets = pa.array(np.arange(len(rows) + 1), pa.int32())
        chosen = pa.ListArray.from_arrays(offsets, pa.array(value_of(rows)), type=logps)
        rejected = pa.ListArray.from_arrays(
            pa.array(np.zeros(len(rows) + 1), pa.int32()), pa.array([], pa.float32()), type=logps
        )
        origins = json.dumps({digest: [[0, start, len(rows)]]}).encode()
        with_origins = schema.with_metadata({b"origins": origins})
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, with_origins) as writer:
            writer.write_batch(pa.RecordBatch.from_arrays([keys, chosen, rejected], schema=with_origins))
        content = sink.getvalue()
        name = f"{1_700_000_000_000 + number:013d}-{len(rows)}-{hashlib.sha256(content).hexdigest()}.arrow"
        (directory / name).write_bytes(content)


def count_hashed_bytes() -> list[int]:
    """Return a list that gets the size of each file that is hashed from now on."""
    sizes, original = list[int](), hashlib.file_digest

    def counted(file: Any, digest: Any) -> Any:
        sizes.append(os.fstat(file.fileno()).st_size)  # several threads hash
        return original(file, digest)

    hashlib.file_digest = counted  # type: ignore[assignment]
    return sizes


def peak_megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000


def measure(root: Path, num_pairs: int, order: str, rank: int, num_ranks: int) -> dict[str, float]:
    """Look up all pairs, and read the keys and logps of some steps."""
    import torch

    from thresher.data.batching.batches import CostModel, ScoringBatching
    from thresher.reference.cache import ReferenceCache
    from thresher.reference.fingerprint import ReferenceFingerprint
    from thresher.reference.scorers import precomputed

    options: dict[str, Any] = {}
    if num_ranks > 1:
        import torch.distributed as dist

        dist.init_process_group("gloo", rank=rank, world_size=num_ranks)
        if "group" in inspect.signature(precomputed).parameters:
            from thresher.distributed.groups import Group

            options["group"] = Group(rank, num_ranks, dist.group.WORLD)
    hashed, imported = count_hashed_bytes(), peak_megabytes()
    started, used = time.perf_counter(), time.process_time()
    source, cache = SyntheticPairs(num_pairs, order), ReferenceCache(root, ReferenceFingerprint("w", "s", "", ""), "")
    batching = ScoringBatching(4096, costs=CostModel(attention_per_key=0, shares_prompt=True))
    reference = precomputed(
        cache, source, None, blocks_of=batching.blocks, device=torch.device("cpu"), num_visits=1, **options
    )
    if reference.num_missing:
        raise SystemExit(f"{reference.num_missing} pairs were not found")
    looked_up = peak_megabytes()
    seconds, used, sent = time.perf_counter() - started, time.process_time() - used, 0
    found = getattr(reference, "found", None)
    if found is not None:
        sent = len(pickle.dumps(found))
    started, draw = time.perf_counter(), np.random.default_rng(rank)
    for _ in range(STEPS):
        ids = draw.integers(0, num_pairs, PAIRS_PER_STEP)
        if found is None:
            values = [logps[0][0] for logps in reference.find(ids)]
        else:
            values = [logps[0][0] for _, logps in found.read(ids)]
        assert (np.array(values) == value_of(source.rows(ids))).all()
    return {
        "seconds": round(seconds, 2),
        "CPU seconds": round(used, 2),
        "peak MB of the lookup": round(looked_up),
        "peak MB with steps": round(peak_megabytes()),
        "MB after imports": round(imported),
        "hashed MB": round(sum(hashed) / 1e6, 1),
        "ms per step": round((time.perf_counter() - started) / STEPS * 1000, 1),
        "bytes to other ranks": sent,
    }


def in_fresh_processes(root: Path, num_pairs: int, order: str, num_ranks: int) -> list[dict[str, float]]:
    environment = os.environ | {
        "THRESHER_CACHE_DIR": str(root / "user"),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29731",
    }
    command = [sys.executable, __file__, str(num_pairs), "--measure", str(root), order]
    children = [
        subprocess.Popen([*command, str(rank), str(num_ranks)], env=environment, stdout=subprocess.PIPE, text=True)
        for rank in range(num_ranks)
    ]
    outputs = [child.communicate()[0] for child in children]
    return [json.loads(output) for output in outputs]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("pairs", type=int, nargs="+")
    parser.add_argument("--ranks", type=int, nargs="*", default=[1])
    parser.add_argument("--orders", nargs="*", default=ORDERS)
    parser.add_argument("--starts", type=int, default=2)
    parser.add_argument("--measure", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        root, order, rank, num_ranks = arguments.measure
        print(json.dumps(measure(Path(root), arguments.pairs[0], order, int(rank), int(num_ranks))))
        return
    from thresher.reference.cache import ReferenceCache
    from thresher.reference.fingerprint import ReferenceFingerprint

    for num_pairs in arguments.pairs:
        with tempfile.TemporaryDirectory() as directory:
            root = Path(directory)
            write_shards(ReferenceCache(root, ReferenceFingerprint("w", "s", "", ""), "").directory, num_pairs)
            time.sleep(3)  # files that were just written are not remembered as verified
            for order in arguments.orders:
                for num_ranks in arguments.ranks:
                    for start in ("first", "second")[: arguments.starts]:
                        of_ranks = in_fresh_processes(root, num_pairs, order, num_ranks)
                        hashed = sum(each["hashed MB"] for each in of_ranks)
                        most = {name: max(each[name] for each in of_ranks) for name in of_ranks[0]}
                        run = f"{num_pairs:,} pairs, {order}, {num_ranks} ranks, {start} start"
                        print(f"{run}: {most}, hashed by all {hashed:.1f} MB", flush=True)
                    for path in [*root.glob("user/**/*.json"), *root.glob("*/*.rows")]:
                        path.unlink()


if __name__ == "__main__":
    main()
