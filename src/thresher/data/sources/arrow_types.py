"""Read Arrow extension types as their storage types, because an extension type may run Python code on a file's bytes.

Ray, for example, registers a type that unpickles its values; a file only has to name it.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from thresher.errors import UserError


def strip_extension_types(batch: Any) -> Any:
    """Cast a record batch or table to the storage types of its columns."""
    fields = [_storage_field(field) for field in batch.schema]
    if all(new.type.equals(old.type) for new, old in zip(fields, batch.schema, strict=True)):
        return batch
    return batch.cast(pa.schema(fields))


def _storage_field(field: Any) -> Any:
    return pa.field(field.name, _storage_type(field.type, field.name), field.nullable)


def _storage_type(data_type: Any, column: str) -> Any:
    if isinstance(data_type, pa.BaseExtensionType):
        return _storage_type(data_type.storage_type, column)
    if pa.types.is_struct(data_type):
        return pa.struct([_storage_field(data_type.field(number)) for number in range(data_type.num_fields)])
    if pa.types.is_list(data_type):
        return pa.list_(_storage_field(data_type.value_field))
    if pa.types.is_large_list(data_type):
        return pa.large_list(_storage_field(data_type.value_field))
    if pa.types.is_fixed_size_list(data_type):
        return pa.list_(_storage_field(data_type.value_field), data_type.list_size)
    if pa.types.is_map(data_type):
        return pa.map_(_storage_field(data_type.key_field), _storage_field(data_type.item_field))
    if _has_extension(data_type):
        raise UserError(f"column {column!r} has the unsupported type {data_type}; store it as a plain type")
    return data_type


def _has_extension(data_type: Any) -> bool:
    children = [data_type.field(number).type for number in range(data_type.num_fields)]
    if pa.types.is_dictionary(data_type):
        children.append(data_type.value_type)
    return isinstance(data_type, pa.BaseExtensionType) or any(map(_has_extension, children))
