"""Pairs in the store's columns, and the hashes by which they are known."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from thresher.data.batch import Pair
from thresher.data.store import HASH_BYTES, SCHEMA


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
    columns = [
        _list_array([pair.prompt_ids for pair in pairs], pa.int32()),
        _list_array([pair.chosen_ids for pair in pairs], pa.int32()),
        _list_array([pair.rejected_ids for pair in pairs], pa.int32()),
        _list_array([pair.chosen_mask for pair in pairs], pa.bool_()),
        _list_array([pair.rejected_mask for pair in pairs], pa.bool_()),
        pa.array([pair.weight for pair in pairs], pa.float32()),
        pa.array([pair.margin for pair in pairs], pa.float32()),
        pa.array([each.pair for each in hashes], pa.binary(HASH_BYTES)),
        pa.array([each.prompt for each in hashes], pa.binary(HASH_BYTES)),
    ]
    typed = [column.cast(field.type) for column, field in zip(columns, SCHEMA, strict=True)]
    return pa.RecordBatch.from_arrays(typed, schema=SCHEMA)


def _list_array(values: Sequence[npt.NDArray[Any] | None], item_type: Any) -> Any:
    lengths = np.asarray([0 if value is None else len(value) for value in values], dtype=np.int64)
    present = [value for value in values if value is not None]
    flat = np.concatenate(present) if present else np.zeros(0)
    return _to_lists(lengths, flat, np.asarray([value is not None for value in values], dtype=np.bool_), item_type)


def _to_lists(
    lengths: npt.NDArray[np.int64], flat: npt.NDArray[Any], is_valid: npt.NDArray[np.bool_], item_type: Any
) -> Any:
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())
    nulls = None if is_valid.all() else pa.array(~is_valid)
    return pa.ListArray.from_arrays(offsets, pa.array(flat, item_type), mask=nulls)


def canonical(batch: Any) -> Any:
    """Copy a batch into buffers of its own: a slice would write bytes that tell how its pairs arrived."""
    columns = []
    for column in batch.columns:
        if pa.types.is_list(column.type):
            is_valid = column.is_valid().to_numpy(zero_copy_only=False)
            lengths = np.where(is_valid, np.diff(column.offsets.to_numpy()), 0)
            flat = column.flatten().to_numpy(zero_copy_only=False)
            columns.append(_to_lists(lengths, flat, is_valid, column.type.value_type).cast(column.type))
        else:
            columns.append(pa.Array.from_buffers(column.type, len(column), [None, pa.py_buffer(value_bytes(column))]))
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def value_bytes(array: Any) -> bytes:
    """Return the bytes of a column of fixed width."""
    width = array.type.bit_width // 8
    return memoryview(array.buffers()[1])[array.offset * width : (array.offset + len(array)) * width].tobytes()


def lengths_of(batch: Any) -> npt.NDArray[np.int32]:
    """Tokens of prompt, chosen and rejected of each pair of a record batch: [pairs, 3]."""
    return np.stack([np.diff(batch.column(column).offsets.to_numpy()) for column in range(3)], axis=1)
