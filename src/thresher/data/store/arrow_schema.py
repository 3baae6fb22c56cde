"""Convert examples to Arrow record batches and compute their content hashes."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from thresher.data.example import SUBSET_BYTES, Example, Response, StoredKind, kind_of
from thresher.data.store.reader import HASH_BYTES, fixed_width_values, schema_of


@dataclass(frozen=True)
class PairHashes:
    """Hashes of token ids and masks; `swapped` is the hash of the example with its responses in reverse order."""

    pair: bytes
    swapped: bytes
    prompt: bytes


def hash_example(pair: Example) -> PairHashes:
    """Hash the model's input: token ids and masks, without values, weight and margin."""
    prompt = _hash(pair.prompt_ids.astype("<i4").tobytes())
    sides = [_hash_response(response) for response in pair.responses]
    return PairHashes(_hash(b"".join([prompt, *sides])), _hash(b"".join([prompt, *sides[::-1]])), prompt)


def _hash_response(response: Response) -> bytes:
    ids_hash, mask = _hash(response.ids.astype("<i4").tobytes()), response.mask
    # a mask that scores every token is equivalent to no mask
    return ids_hash if mask is None or mask.all() else _hash(ids_hash + mask.astype(np.uint8).tobytes())


def _hash(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=HASH_BYTES).digest()


def pairs_to_record_batch(
    pairs: Sequence[Example], hashes: Sequence[PairHashes], kind: StoredKind = "pairs", extra: Sequence[str] = ()
) -> Any:
    """Build a record batch with the columns of a kind of examples."""
    values: dict[str, list[Any]] = {
        "prompt_ids": [pair.prompt_ids for pair in pairs],
        "weight": [pair.weight for pair in pairs],
        "margin": [pair.margin for pair in pairs],
        "hash": [each.pair for each in hashes],
        "prompt_hash": [each.prompt for each in hashes],
        "subset": [pair.subset.encode().ljust(SUBSET_BYTES, b"\0") for pair in pairs],
        "order": [pair.order for pair in pairs],
    }
    if kind_of(kind) == "pairs":
        for name, side in (("chosen", 0), ("rejected", 1)):
            values[f"{name}_ids"] = [pair.responses[side].ids for pair in pairs]
            values[f"{name}_mask"] = [pair.responses[side].mask for pair in pairs]
            values[f"{name}_weights"] = [pair.responses[side].weights for pair in pairs]
    else:
        lists = [pair.responses for pair in pairs]
        values["response_ids"] = [np.concatenate([each.ids for each in responses]) for responses in lists]
        values["response_lengths"] = [np.array([len(each.ids) for each in responses]) for responses in lists]
        values["response_mask"] = [_joined_mask(responses) for responses in lists]
        values["values"] = [np.array([each.value for each in responses]) for responses in lists]
    schema = schema_of(kind, extra)
    columns = [
        (list_array if pa.types.is_list(field.type) else pa.array)(values[field.name], field.type) for field in schema
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _joined_mask(responses: Sequence[Response]) -> npt.NDArray[np.bool_] | None:
    if all(each.mask is None for each in responses):
        return None
    return np.concatenate([np.ones(len(each.ids), np.bool_) if each.mask is None else each.mask for each in responses])


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
    return pa.RecordBatch.from_arrays(columns, schema=batch.schema)


def lengths_of(batch: Any) -> npt.NDArray[np.int32]:
    """Return the token counts of a record batch: [examples, (prompt, response, response...)], 0 for absent ones."""
    if "chosen_ids" in batch.schema.names:
        return np.stack([np.diff(batch.column(column).offsets.to_numpy()) for column in range(3)], axis=1)
    column = batch.column("response_lengths")
    counts = np.diff(column.offsets.to_numpy())
    lengths = np.zeros((len(counts), 1 + counts.max(initial=1)), dtype=np.int32)
    lengths[:, 0] = np.diff(batch.column("prompt_ids").offsets.to_numpy())
    lengths[:, 1:][np.arange(lengths.shape[1] - 1) < counts[:, None]] = column.flatten().to_numpy()
    return lengths


def scored_lengths_of(batch: Any, lengths: npt.NDArray[np.int32]) -> npt.NDArray[np.int32] | None:
    """Return the scored tokens of each response, given `lengths_of` the batch; None if it has no masks."""
    scored, has_masks = lengths[:, 1:].copy(), False
    if "chosen_ids" in batch.schema.names:
        for side, column in enumerate((batch.column("chosen_mask"), batch.column("rejected_mask"))):
            for row in np.flatnonzero(column.is_valid().to_numpy(zero_copy_only=False)):
                has_masks = True
                scored[row, side] = column[int(row)].values.true_count
        return scored if has_masks else None
    column = batch.column("response_mask")
    for row in np.flatnonzero(column.is_valid().to_numpy(zero_copy_only=False)):
        has_masks = True
        mask, sizes = column[int(row)].values.to_numpy(zero_copy_only=False), scored[row][scored[row] > 0]
        scored[row, : len(sizes)] = np.add.reduceat(mask.astype(np.int32), np.cumsum(sizes) - sizes)
    return scored if has_masks else None


def find_sorted(keys: npt.NDArray[Any], sorted_keys: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Return the index of each key in `sorted_keys`, or -1 if it is absent."""
    order = np.argsort(keys)  # sorted lookups share cache lines: four times faster than random ones
    at = np.searchsorted(sorted_keys, keys[order])
    found = at < len(sorted_keys)
    found[found] = sorted_keys[at[found]] == keys[order[found]]
    result = np.full(len(keys), -1, dtype=np.int64)
    result[order[found]] = at[found]
    return result
