"""Columns as what they are stored as: an extension type of Arrow may be Python code that runs on a file's bytes.

Ray, for one, registers a type whose values are unpickled when they are read; a file only has to name it.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from thresher.errors import UserError


def strip_extension_types(batch: Any) -> Any:
    """Give a record batch or table without its extension types, whoever has registered them."""
    fields = [_plain_field(field) for field in batch.schema]
    if all(new.type.equals(old.type) for new, old in zip(fields, batch.schema, strict=True)):
        return batch
    return batch.cast(pa.schema(fields))


def _plain_field(field: Any) -> Any:
    return pa.field(field.name, _plain(field.type, field.name), field.nullable)


def _plain(kind: Any, column: str) -> Any:
    if isinstance(kind, pa.BaseExtensionType):
        return _plain(kind.storage_type, column)
    if pa.types.is_struct(kind):
        return pa.struct([_plain_field(kind.field(number)) for number in range(kind.num_fields)])
    if pa.types.is_list(kind):
        return pa.list_(_plain_field(kind.value_field))
    if pa.types.is_large_list(kind):
        return pa.large_list(_plain_field(kind.value_field))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(_plain_field(kind.value_field), kind.list_size)
    if pa.types.is_map(kind):
        return pa.map_(_plain_field(kind.key_field), _plain_field(kind.item_field))
    if _holds_extension(kind):
        raise UserError(f"column {column!r} is of the type {kind}, which is not read; store it as a plain type")
    return kind


def _holds_extension(kind: Any) -> bool:
    inner = [kind.field(number).type for number in range(kind.num_fields)]
    if pa.types.is_dictionary(kind):
        inner.append(kind.value_type)
    return isinstance(kind, pa.BaseExtensionType) or any(map(_holds_extension, inner))
