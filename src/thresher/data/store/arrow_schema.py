"""Convert pairs to Arrow record batches and compute their content hashes."""

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
    """Hashes of token ids and masks; `swapped` is the hash of the pair with its sides exchanged."""

    pair: bytes
    swapped: bytes
    prompt: bytes


def hash_pair(pair: Pair) -> PairHashes:
    """Hash the model's input: token ids and masks, without weight and margin."""
    prompt = _hash(pair.prompt_ids.astype("<i4").tobytes())
    chosen = _hash_side(pair.chosen_ids, pair.chosen_mask)
    rejected = _hash_side(pair.rejected_ids, pair.rejected_mask)
    return PairHashes(_hash(prompt + chosen + rejected), _hash(prompt + rejected + chosen), prompt)


def _hash_side(ids: npt.NDArray[np.int32], mask: npt.NDArray[np.bool_] | None) -> bytes:
    ids_hash = _hash(ids.astype("<i4").tobytes())
    # a mask that scores every token is equivalent to no mask
    return ids_hash if mask is None or mask.all() else _hash(ids_hash + mask.astype(np.uint8).tobytes())


def _hash(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=HASH_BYTES).digest()


def pairs_to_record_batch(pairs: Sequence[Pair], hashes: Sequence[PairHashes]) -> Any:
    """Build a record batch with the columns of `SCHEMA`."""
    values: dict[str, list[Any]] = {field.name: [getattr(pair, field.name) for pair in pairs] for field in fields(Pair)}
    values |= {"hash": [each.pair for each in hashes], "prompt_hash": [each.prompt for each in hashes]}
    columns = [
        (list_array if pa.types.is_list(field.type) else pa.array)(values[field.name], field.type) for field in SCHEMA
    ]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def list_array(values: Sequence[npt.NDArray[Any] | None], list_type: Any) -> Any:
    """Build an Arrow list column from arrays; None becomes null."""
    present = [value for value in values if value is not None]
    lengths = np.asarray([0 if value is None else len(value) for value in values], dtype=np.int64)
    is_valid = np.asarray([value is not None for value in values], dtype=np.bool_)
    return _to_lists(lengths, np.concatenate(present) if present else np.zeros(0), is_valid, list_type)


def _to_lists(
    lengths: npt.NDArray[np.int64], flat: npt.NDArray[Any], is_valid: npt.NDArray[np.bool_], list_type: Any
) -> Any:
    offsets = _number_array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())
    item = list_type.value_type
    values = pa.array(flat, item) if pa.types.is_boolean(item) else _number_array(flat, item)
    nulls = None if is_valid.all() else pa.array(~is_valid)
    return pa.ListArray.from_arrays(offsets, values, type=list_type, mask=nulls)


def _number_array(values: npt.NDArray[Any], arrow_type: Any) -> Any:
    # not pa.array, which imports pandas: every worker that scores a reference writes lists of logps
    content = values.astype(arrow_type.to_pandas_dtype(), copy=False)
    return pa.Array.from_buffers(arrow_type, len(content), [None, pa.py_buffer(content)])


def rebuild_buffers(batch: Any) -> Any:
    """Copy a batch into new buffers: the bytes written for a slice depend on how its parent was built."""
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
    """Return the token counts of a record batch: [pairs, (prompt, chosen, rejected)]."""
    return np.stack([np.diff(batch.column(column).offsets.to_numpy()) for column in range(3)], axis=1)


def find_sorted(keys: npt.NDArray[Any], sorted_keys: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Return the index of each key in `sorted_keys`, or -1 if it is absent."""
    order = np.argsort(keys)  # sorted lookups share cache lines: four times faster than random ones
    at = np.searchsorted(sorted_keys, keys[order])
    found = at < len(sorted_keys)
    found[found] = sorted_keys[at[found]] == keys[order[found]]
    result = np.full(len(keys), -1, dtype=np.int64)
    result[order[found]] = at[found]
    return result
