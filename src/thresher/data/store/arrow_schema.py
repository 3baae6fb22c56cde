"""Pairs in the store's columns, and the hashes by which they are known."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from thresher.data.pair import Pair
from thresher.data.store.reader import HASH_BYTES, SCHEMA, fixed_width_values


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
    values: dict[str, list[Any]] = {field.name: [getattr(pair, field.name) for pair in pairs] for field in fields(Pair)}
    values |= {"hash": [each.pair for each in hashes], "prompt_hash": [each.prompt for each in hashes]}
    columns = [
        (list_array if pa.types.is_list(field.type) else pa.array)(values[field.name], field.type) for field in SCHEMA
    ]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def list_array(values: Sequence[npt.NDArray[Any] | None], list_type: Any) -> Any:
    """Lay arrays out as an Arrow column of lists; None is null."""
    present = [value for value in values if value is not None]
    lengths = np.asarray([0 if value is None else len(value) for value in values], dtype=np.int64)
    is_valid = np.asarray([value is not None for value in values], dtype=np.bool_)
    return _to_lists(lengths, np.concatenate(present) if present else np.zeros(0), is_valid, list_type)


def _to_lists(
    lengths: npt.NDArray[np.int64], flat: npt.NDArray[Any], is_valid: npt.NDArray[np.bool_], list_type: Any
) -> Any:
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())
    nulls = None if is_valid.all() else pa.array(~is_valid)
    return pa.ListArray.from_arrays(offsets, pa.array(flat, list_type.value_type), type=list_type, mask=nulls)


def rebuild_buffers(batch: Any) -> Any:
    """Copy a batch into buffers of its own: a slice would write bytes that tell how its pairs arrived."""
    columns = []
    for column in batch.columns:
        if pa.types.is_list(column.type):
            is_valid = column.is_valid().to_numpy(zero_copy_only=False)
            lengths = np.where(is_valid, np.diff(column.offsets.to_numpy()), 0)
            flat = column.flatten().to_numpy(zero_copy_only=False)
            columns.append(_to_lists(lengths, flat, is_valid, column.type))
        else:
            values = fixed_width_values(column, np.dtype(f"V{column.type.byte_width}")).tobytes()
            columns.append(pa.Array.from_buffers(column.type, len(column), [None, pa.py_buffer(values)]))
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def lengths_of(batch: Any) -> npt.NDArray[np.int32]:
    """Tokens of prompt, chosen and rejected of each pair of a record batch: [pairs, 3]."""
    return np.stack([np.diff(batch.column(column).offsets.to_numpy()) for column in range(3)], axis=1)


def find_sorted(keys: npt.NDArray[Any], sorted_keys: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Tell where each key stands among sorted ones, -1 where it does not."""
    order = np.argsort(keys)  # neighbours in order walk the same cache lines: four times faster than at random
    at = np.searchsorted(sorted_keys, keys[order])
    found = at < len(sorted_keys)
    found[found] = sorted_keys[at[found]] == keys[order[found]]
    result = np.full(len(keys), -1, dtype=np.int64)
    result[order[found]] = at[found]
    return result
